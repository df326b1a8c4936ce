// Not emulated; the message names what is.
#error "the emulator has no CUB; nearest: cooperative_groups/reduce.h and scan.h"
