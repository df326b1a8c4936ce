// Makes the host's std known as cuda::std, for the headers of cuda/std.
#pragma once

namespace std {}

namespace cuda {
namespace std {
using namespace ::std;
}
}  // namespace cuda
