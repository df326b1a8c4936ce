// assert() of device code: a failed one ends the launch and names its place. Off under NDEBUG.
#undef assert
#ifdef NDEBUG
#define assert(...) ((void)0)
#else
#include "emulator/core.h"
#define assert(...)                                                                             \
  (static_cast<bool>(__VA_ARGS__)                                                               \
       ? void(0)                                                                                \
       : ::emulator::fail(::emulator::Kind::device_assert, EMULATOR_HERE, "assert(%s) failed",  \
                          #__VA_ARGS__))
#endif
