"""Where kernels and arrays live: on a GPU through CuPy, or on the host through the emulator.

Owns the kernel files, their compilation and its cache, and the runtimes that launch them. It never
knows a model or an operation: `cupaged.ops` decides what is launched, this package how.
"""
