#include "kernels/copy.h"

#include "kernels/reference.h"

namespace dcoll {
namespace {

// Below and above the size from which the caches are bypassed, at every alignment.
TEST(copies_every_byte_and_no_other) {
  constexpr size_t kStream = 64 << 10;
  const size_t sizes[] = {0, 1, 63, 64, 65, 4099, kStream - 1, kStream, kStream + 1, kStream + 63, 3 * kStream + 17};
  for (const size_t bytes : sizes) {
    for (const size_t shift : {0, 1, 4, 8, 17, 63}) {
      test::Guarded from(bytes, (shift * 7) % 64), to(bytes, shift);
      for (size_t i = 0; i < bytes; ++i) from.data()[i] = static_cast<char>(i * 31 + i / 256);
      kernels::stream_copy(to.data(), from.data(), bytes);
      CHECK(std::memcmp(to.data(), from.data(), bytes) == 0);
      to.check_guards();
    }
  }
}

}  // namespace
}  // namespace dcoll

TEST_MAIN
