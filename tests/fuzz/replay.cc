// The fuzzers without libFuzzer: every file of a corpus, then random mutations of them.
//   fuzz_X CORPUS [MUTATIONS [SEED]]
// The seed, which TESTS_SEED may give too, is printed first: with it the same inputs come again. The input under way
// when the process is killed by a signal is written to crash-input in the working directory.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "fuzz.h"

namespace {

using Bytes = std::vector<uint8_t>;
Bytes input;  // under way

void keep_input(int signal) {
  const int file = open("crash-input", O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (file >= 0 && write(file, input.data(), input.size()) < 0) _exit(1);
  ::signal(signal, SIG_DFL);
  raise(signal);
}

void try_one(Bytes bytes) {
  input = std::move(bytes);
  LLVMFuzzerTestOneInput(input.data(), input.size());
}

// As libFuzzer does: bytes changed, taken out, put in, doubled, taken from another input.
Bytes mutated(Bytes bytes, const Bytes& other, std::mt19937_64& random) {
  const auto below = [&](size_t limit) { return static_cast<size_t>(random() % std::max<size_t>(limit, 1)); };
  for (size_t changes = 1 + below(4); changes > 0; --changes) {
    const size_t at = below(bytes.size() + 1);
    const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    switch (below(5)) {
      case 0:
        if (at < bytes.size()) bytes[at] = static_cast<uint8_t>(random());
        break;
      case 1:
        bytes.erase(place, place + static_cast<std::ptrdiff_t>(below(bytes.size() - at + 1)));
        break;
      case 2:
        bytes.insert(place, below(9), static_cast<uint8_t>(random()));
        break;
      case 3:
        if (at < bytes.size()) bytes[at] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 4:
        bytes.insert(place, other.begin(), other.begin() + static_cast<std::ptrdiff_t>(below(other.size() + 1)));
        break;
    }
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const size_t mutations = argc > 2 ? std::stoul(argv[2]) : 1000;
  const char* given = std::getenv("TESTS_SEED");
  const uint64_t seed = argc > 3           ? std::stoull(argv[3])
                        : given != nullptr ? std::stoull(given)
                                           : std::random_device{}();
  std::vector<Bytes> corpus{{}};
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    std::ifstream file(entry.path(), std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::printf("%zu inputs of %s, %zu mutations, seed %llu\n", corpus.size(), argv[1], mutations,
              static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  if (corpus.size() < 2) return 2;  // without a corpus this tests nothing
  std::sort(corpus.begin(), corpus.end());
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) ::signal(signal, keep_input);
  for (const Bytes& one : corpus) try_one(one);
  std::mt19937_64 random(seed);
  for (size_t i = 0; i < mutations; ++i) {
    try_one(mutated(corpus[random() % corpus.size()], corpus[random() % corpus.size()], random));
  }
}
