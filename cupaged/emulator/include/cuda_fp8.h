// Not emulated; the message names what is.
#error "the emulator has no fp8 types; nearest: unsigned char storage, decoded by hand"
