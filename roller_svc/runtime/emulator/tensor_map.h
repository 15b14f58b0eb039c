// A tensor map as a kernel's parameter: the fields of ir/tensor_map.py, filled by text.py's tables.
#pragma once

struct TensorMap {
  const char *name;        // of the parameter
  unsigned char *data;     // where the view begins
  const char *buffer;      // whose memory that is
  unsigned int element_bytes;
  int rank;
  bool pixels;             // im2col: dimensions are c, w[, h[, d]], n, and box is {channels, pixels}
  bool tf32;               // float32 elements are rounded to tf32 on their way to shared memory
  unsigned int swizzle_bytes;  // 0, 32, 64, 128
  unsigned int bytes;      // of a whole box in shared memory
  // innermost dimension first: elements, bytes from one to the next, elements of the tensor that a box spans, steps
  unsigned long extents[5], strides[5];
  unsigned int box[5], steps[5];
  int lower[3], upper[3];  // corners of pixels along w, h, d: before them, and before extent + upper, they wrap
};
