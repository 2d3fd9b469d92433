#include "engine/collective/fabric.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>

#include "base/hash.h"
#include "kernels/topk.h"
#include "plan/select.h"

namespace dcoll {

using plan::Collective;

std::shared_ptr<const plan::Schedule> Fabric::schedule(const plan::Algorithm& algorithm, int root) {
  for (const Cached& entry : cache_) {
    if (entry.algorithm == &algorithm && entry.root == root) return entry.schedule;
  }
  auto built = std::make_shared<const plan::Schedule>(
      algorithm.build(static_cast<uint32_t>(size), static_cast<uint32_t>(rank), static_cast<uint32_t>(root)));
  cache_.push_back({&algorithm, root, built});
  return built;
}

// Sizes are rounded up to a power of two: the model is asked once for each, and all ranks ask for the same.
const Fabric::Fastest& Fabric::fastest(Collective collective, size_t bytes) {
  const size_t rounded = std::bit_ceil(std::max<size_t>(bytes, 1));
  Fastest& known = fastest_[static_cast<size_t>(collective)][std::countr_zero(rounded)];
  if (known.algorithm == nullptr) {
    const plan::Choice choice = plan::select(collective, rounded, topology, slice_bytes);
    known = {choice.algorithm, static_cast<size_t>(choice.slice_bytes)};
  }
  return known;
}

void Fabric::tell_uncompressed() const {
  if (rank != 0 || size == 1 || may_encode(SIZE_MAX) || told_uncompressed->exchange(true)) return;
  tell(LogLevel::kWarning,
       "nothing is compressed inside one node, where memory is faster than any encoder (DCOLL_COMPRESS_LOCAL=1 does it "
       "all the same)");
}

// Rounded up as there.
Fabric::Weighed* Fabric::weighed(const kernels::Encoding& encoding, size_t bytes) const {
  const size_t rounded = std::bit_ceil(bytes);
  const auto found = std::ranges::find_if(
      weighed_, [&](const Weighed& known) { return known.bytes == rounded && known.encoding == encoding; });
  return found == weighed_.end() ? nullptr : &*found;
}

bool Fabric::pays(const kernels::Encoding& encoding, size_t bytes) const {
  const plan::Coding* const coding = codings.find(encoding);
  if (coding == nullptr) return false;
  if (const Weighed* const known = weighed(encoding, bytes)) {
    return known->trial != nullptr ? known->trial->second_next() : known->pays;
  }
  const size_t rounded = std::bit_ceil(bytes);
  plan::Coding asked = *coding;
  asked.share = kernels::encoded_share(encoding);
  const auto times = plan::predict_encoded(rounded, asked, topology, slice_bytes, hierarchy != nullptr);
  if (weighed_.size() >= kMostWeighed) weighed_.clear();  // a share that changes from call to call
  weighed_.push_back({encoding, rounded, times.pays(), nullptr});
  // What was told not to measure is believed.
  if (links.use != LinkConstants::Use::kBuiltIn && times.is_close(rounded)) {
    weighed_.back().trial = std::make_unique<Trial>(Trial::calls_each_way(rounded));
    return weighed_.back().trial->second_next();
  }
  tell_choice(encoding, rounded, times, "predicted");
  return times.pays();
}

Trial* Fabric::trial(const kernels::Encoding& encoding, size_t bytes) {
  Weighed* const known = weighed(encoding, bytes);
  return known == nullptr ? nullptr : known->trial.get();
}

void Fabric::settle(const kernels::Encoding& encoding, size_t bytes, double plain_us_per_byte,
                    double encoded_us_per_byte) {
  Weighed* const known = weighed(encoding, bytes);
  if (known == nullptr) return;
  const auto size = static_cast<double>(known->bytes);
  const plan::EncodedTimes times{size * plain_us_per_byte, size * encoded_us_per_byte};
  known->pays = times.pays();
  known->trial.reset();
  tell_choice(encoding, known->bytes, times, "measured");
}

// A selection's bytes are rounded up to a power of two, as sizes are.
bool Fabric::goes_by_owners(const kernels::Encoding& encoding, size_t count) const {
  if (encoding.codec != kernels::Codec::kTopK || size < 2) return false;
  if (encoding.exchange != kernels::Exchange::kPredicted) return encoding.exchange == kernels::Exchange::kOwners;
  const size_t bytes = std::bit_ceil(kernels::top_bytes(count, kernels::top_count(count, encoding.ratio)));
  std::optional<bool>& known = by_owners_[std::countr_zero(bytes)];
  if (!known) known = plan::owners_pay(bytes, topology, slice_bytes, hierarchy != nullptr);
  return *known;
}

Coded Fabric::coded(const Call& call, EncodedCost& cost) const {
  Coded coded{call.encoding, call.feedback, goes_by_owners(call.encoding, call.count), {}, &cost};
  if (call.encoding.stochastic) {  // draws the same in each run of a program, otherwise on each rank and in each call
    Fingerprint print;
    print.add(call.name).add(static_cast<uint64_t>(rank)).add(encoded_costs.calls(std::string(call.name)));
    coded.key = print.value();
  }
  return coded;
}

void Fabric::tell_choice(const kernels::Encoding& encoding, size_t bytes, const plan::EncodedTimes& times,
                         const char* how) const {
  if (rank != 0) return;
  kernels::Encoding codec = encoding;
  codec.if_it_pays = false;
  const plan::Coding& coding = *codings.find(encoding);
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(),
                "all-reduces of float32 of up to %zu KiB go %s: %.1f ms %s as %s, %.1f ms in full (link %.2f "
                "GB/s, encoding %.1f GB/s, decoding %.1f GB/s)",
                bytes >> 10, times.pays() ? ("as " + kernels::encoding_name(codec)).c_str() : "in full",
                times.encoded_us / 1e3, how, kernels::encoding_name(codec).c_str(), times.plain_us / 1e3,
                1e-3 / topology.network.beta_us_per_byte, 1e-3 / coding.encode_us_per_byte,
                1e-3 / coding.decode_us_per_byte);
  tell(LogLevel::kNotice, text.data());
}

// All ranks share memory: every rank learns where the others' slots are, as the first post on the board.
void Fabric::connect_slots() {
  board = std::make_unique<Board>(*window);
  slots = std::make_unique<Slots>(window, *board, topology.shared_cores);
  all_reduce = std::make_unique<NodeAllReduce>(*board, *slots);
  pull_slots = std::make_unique<PullSlots>(window, *board, topology.shared_cores);
  pull_now = std::make_unique<PullNow>(*board, *pull_slots);
  device_memory = std::make_unique<DeviceMemory>(*board, window);
  slots_posted = board->post({.offset_in = pull_slots->own_offset(), .value = slots->own_offset()});
}

}  // namespace dcoll
