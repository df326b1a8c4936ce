#pragma once
#error "the emulator has no Thrust; nearest: CuPy's own functions around the launches"
