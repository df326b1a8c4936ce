// Nothing to add to emulator/prelude.h, which comes before every kernel file.
#pragma once
