"""Small programs that show how cupaged is used. Each one is run by the tests."""
