// Not emulated; the message names what is.
#error "the emulator has no nvcuda::wmma; nearest: the mma.sync wrappers of cuda/ptx.cuh"
