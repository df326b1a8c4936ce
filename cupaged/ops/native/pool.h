// Threads that share out the units of one job at a time, and memory that each of them keeps.
#pragma once

#include <cstdint>

namespace pool {

// Calls work(context, unit) for every unit from 0 to num_units - 1, on this thread and the others.
// Units are taken one by one, so that a thread that the system holds up holds up its own unit only.
void run(std::int64_t num_units, void (*work)(const void* context, std::int64_t unit),
         const void* context);

template <class Work>
void run(std::int64_t num_units, const Work& work) {
  run(num_units,
      [](const void* context, std::int64_t unit) { (*static_cast<const Work*>(context))(unit); },
      &work);
}

// How many threads share the work, this one included. False where the system does not give so many:
// then this one works alone.
bool set_threads(int count);
int num_threads();

// Uninitialised memory of this thread, aligned to 64 bytes; good until it asks again.
float* scratch(std::int64_t num_floats);
// The same, beside it: what a job is given by the thread whose job it is.
float* shared_scratch(std::int64_t num_floats);

}  // namespace pool
