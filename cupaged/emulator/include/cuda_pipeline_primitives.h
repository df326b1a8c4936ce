// The primitives are all of it that the emulator has.
#pragma once

#include "cuda_pipeline.h"
