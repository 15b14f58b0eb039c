// Report a fault and exit: the launch, the block, the thread and the message.
#pragma once
#include "emulator.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

namespace {

constexpr int FAULT = 3, FAILED = 4, OUT_OF_RANGE = 5;

const emulator::Launch *launch;  // the one that runs

[[noreturn]] void report(int status, const char *format, ...) {
  fprintf(stderr, "%s", launch ? launch->name : "setting up");
  if (launch)
    fprintf(stderr, ", block (%u, %u, %u), thread (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
            threadIdx.y, threadIdx.z);
  fprintf(stderr, ": ");
  va_list rest;
  va_start(rest, format);
  vfprintf(stderr, format, rest);
  va_end(rest);
  fprintf(stderr, "\n");
  fflush(stderr);
  _exit(status);
}

[[noreturn]] void failed(const char *what) { report(FAILED, "%s failed", what); }

}  // namespace
