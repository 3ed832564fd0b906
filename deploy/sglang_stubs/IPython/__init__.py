"""Stands for IPython, of which SGLang imports what notebooks show."""  # noqa: N999 - its name
