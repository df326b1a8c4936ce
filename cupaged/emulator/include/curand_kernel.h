// Not emulated; the message names what is.
#error "the emulator has no cuRAND; nearest: a counter-based generator in the kernel (Philox)"
