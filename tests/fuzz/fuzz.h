// What all fuzzers share. A fuzzer is one function of bytes from outside, which must neither crash nor hang nor break a
// promise. With clang, libFuzzer searches for such bytes (`make fuzz SECONDS=60`); every other build replays the corpus
// and random mutations of it as a test (replay.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#define FUZZ_CHECK(expression)                                                            \
  do {                                                                                    \
    if (!(expression)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #expression); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)
