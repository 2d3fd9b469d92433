#include "kernels/pack.h"

#include <numeric>

#include "kernels/reference.h"

namespace dcoll {
namespace {

using kernels::pack;
using kernels::Segment;
using kernels::unpack;
using test::Guarded;

struct Layout {
  std::vector<Guarded> tensors;
  std::vector<Segment> segments;
  size_t bytes = 0;

  // Tensors of the given sizes, each followed by a gap of 3 bytes, the s-th misaligned by s bytes.
  explicit Layout(const std::vector<size_t>& sizes) {
    unsigned char next = 1;
    for (const size_t size : sizes) {
      tensors.emplace_back(size, tensors.size() % 16);
      for (size_t i = 0; i < size; ++i) tensors.back().data()[i] = static_cast<char>(next++);
    }
    for (Guarded& tensor : tensors) {
      segments.push_back({tensor.data(), bytes, tensor.bytes()});
      bytes += tensor.bytes() + 3;
    }
  }
};

TEST(pack_then_unpack) {
  Layout from({0, 1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 1000, 4099, 0, 5});
  Guarded flat(from.bytes, 1);
  std::memset(flat.data(), 0x77, flat.bytes());
  pack(flat.data(), from.segments);
  flat.check_guards();
  for (const Segment& s : from.segments) {
    CHECK(std::memcmp(flat.data() + s.offset_bytes, s.tensor, s.bytes) == 0);
    for (size_t gap = 0; gap < 3; ++gap) CHECK_EQ(flat.data()[s.offset_bytes + s.bytes + gap], 0x77);
  }
  Layout to({0, 1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 1000, 4099, 0, 5});
  for (Guarded& tensor : to.tensors) std::memset(tensor.data(), 0, tensor.bytes());
  unpack(to.segments, flat.data());
  for (size_t t = 0; t < to.tensors.size(); ++t) {
    to.tensors[t].check_guards();
    CHECK(std::memcmp(to.tensors[t].data(), from.tensors[t].data(), from.tensors[t].bytes()) == 0);
  }
}

TEST(segments_in_any_order) {
  Layout layout({33, 8, 100});
  Guarded flat(layout.bytes, 0);
  std::vector<Segment> backwards(layout.segments.rbegin(), layout.segments.rend());
  pack(flat.data(), backwards);
  for (const Segment& s : layout.segments) CHECK(std::memcmp(flat.data() + s.offset_bytes, s.tensor, s.bytes) == 0);
}

TEST(absent_tensors_are_zeros_and_are_skipped) {
  Layout layout({10, 20, 30});
  layout.segments[1].tensor = nullptr;
  Guarded flat(layout.bytes, 5);
  std::memset(flat.data(), 0x77, flat.bytes());
  pack(flat.data(), layout.segments);
  const Segment& absent = layout.segments[1];
  for (size_t i = 0; i < absent.bytes; ++i) CHECK_EQ(flat.data()[absent.offset_bytes + i], 0);
  CHECK_EQ(flat.data()[absent.offset_bytes - 1], 0x77);
  CHECK_EQ(flat.data()[absent.offset_bytes + absent.bytes], 0x77);
  unpack(layout.segments, flat.data());  // would crash if it wrote there
}

TEST(a_view_of_the_flat_buffer_stays) {
  std::vector<char> flat(100);
  std::iota(flat.begin(), flat.end(), 0);
  const auto before = flat;
  const Segment segments[] = {{flat.data() + 40, 40, 20}};
  pack(flat.data(), segments);
  unpack(segments, flat.data());
  CHECK(flat == before);
}

TEST(nothing_to_do) {
  pack(nullptr, {});
  unpack({}, nullptr);
  const Segment empty[] = {{nullptr, 0, 0}};
  pack(nullptr, empty);
  unpack(empty, nullptr);
}

}  // namespace
}  // namespace dcoll

TEST_MAIN
