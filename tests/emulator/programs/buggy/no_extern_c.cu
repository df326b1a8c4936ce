// A kernel whose name the compiler mangles: get_function("scale") cannot find it.
__global__ void scale(float* x, float factor) {
    x[threadIdx.x] *= factor;
}
