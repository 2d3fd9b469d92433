#include "engine/node/device_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/thread_safety.h"
#include "device/descriptors.h"

namespace dcoll {
namespace {

constexpr int kSegmentShift = 48;  // of a word, below which is the offset
constexpr size_t kPattern = 256;   // floats
constexpr size_t kPatternBytes = kPattern * sizeof(float);
constexpr size_t kTrialBytes = (1 + DeviceMemory::kMostRanks) * kPatternBytes;

// Memory of other processes, opened once in this one for all of its communicators.
std::shared_ptr<std::byte> open_once(int device, const device::Handle& handle) {
  using Key = std::pair<int, device::Handle>;
  static auto* const opened = new std::map<Key, std::weak_ptr<std::byte>>;
  static auto* const mutex = new Mutex;
  const MutexLock lock(*mutex);
  std::weak_ptr<std::byte>& known = (*opened)[{device, handle}];
  if (auto still = known.lock()) return still;
  device::Device& by = device::device_of(device);
  std::shared_ptr<std::byte> fresh(static_cast<std::byte*>(by.open(handle)),
                                   [&by](std::byte* data) { by.close(data); });
  known = fresh;
  return fresh;
}

// A stream of its own: what the trial waits for must not be behind work of the program's.
class Scribe {
 public:
  explicit Scribe(int device) : device_(device::device_of(device)), stream_(device_.make_stream()) {}
  ~Scribe() { device_.destroy_stream(stream_); }
  Scribe(const Scribe&) = delete;
  Scribe& operator=(const Scribe&) = delete;
  device::Device& device() { return device_; }
  device::Stream stream() { return stream_; }
  void copy(void* to, const void* from, size_t bytes) {
    device_.copy(to, from, bytes, stream_);
    wait();
  }
  void wait() {
    const auto end = device_.make_event();
    end->record(stream_);
    end->wait();
  }

 private:
  device::Device& device_;
  device::Stream stream_;
};

}  // namespace

// All ranks have parted, after all they did; or they have not, and nobody knows what they still do.
DeviceMemory::~DeviceMemory() {
  static auto* const kept = new std::vector<std::unique_ptr<device::Block>>;
  static auto* const mutex = new Mutex;
  for (auto& [device, blocks] : blocks_) {
    try {
      if (!keeps_blocks_ && blocks.left != nullptr) blocks.left->wait();
    } catch (const Error&) {
      keeps_blocks_ = true;
    }
    for (std::unique_ptr<device::Block>* block : {&blocks.small, &blocks.large, &blocks.trial}) {
      if (*block == nullptr) continue;
      if (!keeps_blocks_) {
        (*block)->set_idle();
        continue;
      }
      const MutexLock lock(*mutex);
      kept->push_back(std::move(*block));
    }
  }
}

bool DeviceMemory::is_likely(int device) const {
  const auto self = static_cast<size_t>(board_.rank());
  return std::ranges::any_of(opened_, [&](const auto& known) { return known.first[self] == device; });
}

bool DeviceMemory::has_opened(const std::vector<int>& devices, const std::vector<size_t>& segments) const {
  const auto known = opened_.find(devices);
  return known != opened_.end() &&
         std::equal(segments.begin(), segments.end(), known->second.begin(), std::less_equal<>());
}

void DeviceMemory::open(const std::vector<int>& devices, const std::vector<size_t>& segments) {
  const int device = devices.at(static_cast<size_t>(board_.rank()));
  for (int rank = 0; rank < board_.size(); ++rank) {
    if (rank == board_.rank()) continue;
    const List& list = *lists_.at(static_cast<size_t>(rank));
    const size_t count = segments.at(static_cast<size_t>(rank));
    if (count > kMostSegments)
      board_.throw_damaged(rank, " lists " + std::to_string(count) + " segments of memory on devices");
    for (size_t segment = 0; segment < count; ++segment) {
      Opened& opened = segments_[{rank, device, segment}];
      const uint64_t bytes = read_once(list.entries[segment].bytes);
      const auto its = static_cast<uint64_t>(devices.at(static_cast<size_t>(rank)));
      const bool is_its = read_once(list.entries[segment].device) == its;
      if (opened.data != nullptr || bytes == 0 || !is_its) continue;
      opened = {open_once(device, list.entries[segment].handle), bytes};
    }
  }
}

std::byte* DeviceMemory::next_half(int device) {
  Blocks& blocks = blocks_[device];
  if (blocks.small == nullptr) blocks.small = device::arena_of(device).alloc(2 * kSmallBytes);
  blocks.second = !blocks.second;
  return blocks.small->data() + (blocks.second ? kSmallBytes : 0);
}

std::byte* DeviceMemory::block(int device, size_t bytes) {
  std::unique_ptr<device::Block>& large = blocks_[device].large;
  if (large == nullptr || large->bytes() < bytes) {
    large.reset();  // the device may still copy out of it
    large = device::arena_of(device).alloc(std::bit_ceil(bytes));
  }
  return large->data();
}

void DeviceMemory::left_behind(int device, device::Stream stream) {
  std::unique_ptr<device::Event>& left = blocks_[device].left;
  if (left == nullptr) left = device::device_of(device).make_event();
  left->record(stream);
}

void DeviceMemory::publish() {
  List& list = own_list();
  while (list.count < kMostSegments) {
    const auto segment = device::segment_at(list.count);
    if (!segment) return;
    list.entries[list.count] = {segment->handle.value_or(device::Handle{}), segment->handle ? segment->bytes : 0,
                                segment->device};
    write_once(list.count, list.count + 1);
  }
}

uint64_t DeviceMemory::word_of(const void* data, size_t bytes, int device) {
  const auto place = device::place_of(data, bytes);
  if (!place || place->segment >= kMostSegments || list_ == nullptr) return Window::kUnmapped;
  if (place->segment >= own_list().count) publish();
  const List::Entry& entry = own_list().entries[place->segment];
  if (entry.bytes == 0 || entry.device != device) return Window::kUnmapped;
  return static_cast<uint64_t>(place->segment) << kSegmentShift | place->offset;
}

std::byte* DeviceMemory::place(int rank, uint64_t word, size_t bytes, int device) const {
  const uint64_t segment = word >> kSegmentShift, offset = word & ((uint64_t{1} << kSegmentShift) - 1);
  std::byte* data = nullptr;
  uint64_t length = 0;
  if (rank == board_.rank()) {
    const auto own = device::segment_at(segment);
    if (own) data = own->data, length = own->bytes;
  } else if (const auto found = segments_.find({rank, device, segment}); found != segments_.end()) {
    data = found->second.data.get();
    length = found->second.bytes;
  }
  if (length == 0 || offset > length || bytes > length - offset) {
    board_.throw_damaged(rank, " posted " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                                   " of segment " + std::to_string(segment) + " of its memory on devices, which has " +
                                   std::to_string(length));
  }
  return data + offset;
}

DeviceMemory::Shown DeviceMemory::show(int device) {
  if (board_.size() > kMostRanks) {
    throw device::DeviceError("more than " + std::to_string(kMostRanks) + " ranks share a node");
  }
  try {
    if (list_ == nullptr) list_ = Memory::mapped(window_, sizeof(List));
  } catch (const TransportError& e) {
    throw device::DeviceError(e.what());
  }
  std::unique_ptr<device::Block>& trial = blocks_[device].trial;
  if (trial == nullptr) trial = device::arena_of(device).alloc(kTrialBytes);
  // Behind it there are no numbers: of another trial the sums would be the same.
  std::vector<std::byte> bytes(kTrialBytes, std::byte{0xff});
  const std::vector<float> pattern(kPattern, static_cast<float>(board_.rank() + 1));
  std::memcpy(bytes.data(), pattern.data(), kPatternBytes);
  Scribe(device).copy(trial->data(), bytes.data(), kTrialBytes);
  const uint64_t memory = word_of(trial->data(), kTrialBytes, device);
  const auto segment = device::segment_at(device::place_of(trial->data(), kTrialBytes)->segment);
  if (memory == Window::kUnmapped) {
    const std::string what = device::device_of(device).name() + ": its memory cannot be shown to other processes";
    throw device::DeviceError(segment->why.empty() ? what : what + ": " + segment->why);
  }
  way_ = device::way_of(*segment->handle);
  return {window_->offset_of(list_->data(), sizeof(List)), memory, num_listed()};
}

// Behind the pattern each rank has a place in everybody's memory.
void DeviceMemory::open_and_write(const std::vector<int>& devices, const std::vector<Shown>& shown) {
  const auto self = static_cast<size_t>(board_.rank());
  const int device = devices.at(self);
  lists_.resize(shown.size());
  std::vector<size_t> segments;
  for (size_t rank = 0; rank < shown.size(); ++rank) {
    if (shown[rank].list == Window::kUnmapped) {
      throw device::DeviceError(board_.window().rank_name(static_cast<int>(rank)) + " shows no memory on a device");
    }
    const std::byte* const list = board_.place(static_cast<int>(rank), shown[rank].list, sizeof(List));
    lists_[rank] = reinterpret_cast<const List*>(list);
    segments.push_back(shown[rank].segments);
  }
  open(devices, segments);
  std::vector<const void*> from;
  std::vector<void*> to;
  for (size_t rank = 0; rank < shown.size(); ++rank) {
    std::byte* const memory = place(static_cast<int>(rank), shown[rank].memory, kTrialBytes, device);
    from.push_back(memory);
    to.push_back(memory + kPatternBytes * (1 + self));
  }
  Scribe scribe(device);
  scribe.device().reduce_n_to_n(to, from, kPattern, DType::kFloat32, ReduceOp::kSum, 1.0, scribe.stream());
  scribe.wait();
}

void DeviceMemory::check(int device) {
  const auto ranks = static_cast<size_t>(board_.size());
  std::vector<float> found(kPattern * ranks);
  Scribe scribe(device);
  scribe.copy(found.data(), blocks_.at(device).trial->data() + kPatternBytes, ranks * kPatternBytes);
  const auto sum = static_cast<float>(ranks * (ranks + 1) / 2);
  if (std::ranges::any_of(found, [&](float value) { return value != sum; })) {
    throw device::DeviceError(scribe.device().name() + ": what other ranks wrote into its memory is not there");
  }
}

}  // namespace dcoll
