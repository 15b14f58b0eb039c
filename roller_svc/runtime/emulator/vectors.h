// CUDA's vector types, aligned as the programming guide has them, and their make_ functions.
#pragma once

#define EMULATOR_VECTOR_2(name, type, bytes) \
  struct __attribute__((aligned(bytes))) name { \
    type x, y; \
  }; \
  inline name make_##name(type x, type y) { return {x, y}; }
#define EMULATOR_VECTOR_4(name, type, bytes) \
  struct __attribute__((aligned(bytes))) name { \
    type x, y, z, w; \
  }; \
  inline name make_##name(type x, type y, type z, type w) { return {x, y, z, w}; }

EMULATOR_VECTOR_2(char2, signed char, 2)
EMULATOR_VECTOR_2(uchar2, unsigned char, 2)
EMULATOR_VECTOR_2(short2, short, 4)
EMULATOR_VECTOR_2(ushort2, unsigned short, 4)
EMULATOR_VECTOR_2(int2, int, 8)
EMULATOR_VECTOR_2(uint2, unsigned int, 8)
EMULATOR_VECTOR_2(longlong2, long long, 16)
EMULATOR_VECTOR_2(ulonglong2, unsigned long long, 16)
EMULATOR_VECTOR_2(float2, float, 8)
EMULATOR_VECTOR_2(double2, double, 16)
EMULATOR_VECTOR_4(char4, signed char, 4)
EMULATOR_VECTOR_4(uchar4, unsigned char, 4)
EMULATOR_VECTOR_4(short4, short, 8)
EMULATOR_VECTOR_4(ushort4, unsigned short, 8)
EMULATOR_VECTOR_4(int4, int, 16)
EMULATOR_VECTOR_4(uint4, unsigned int, 16)
EMULATOR_VECTOR_4(float4, float, 16)

#undef EMULATOR_VECTOR_2
#undef EMULATOR_VECTOR_4
