"""The engine: block manager, scheduler, batch page, runners, engine core and the text shell."""
