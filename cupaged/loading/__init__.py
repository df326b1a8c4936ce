"""Reading what a model is made of: weight files, tokenizers and templates.

Each file format has one module that owns every rule of that format. They validate before they
allocate, raise subclasses of `ModelError` for anything damaged, and never know which model the
numbers belong to.
"""
