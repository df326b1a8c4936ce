// Not emulated; the message names what is.
#error "the emulator has no cooperative_groups::memcpy_async; nearest: cuda_pipeline.h"
