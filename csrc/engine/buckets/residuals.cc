// What encoding lost, kept for the next backward: Reducer's part that knows residuals and velocities.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "engine/buckets/bucket.h"
#include "kernels/reduce.h"

namespace dcoll {

namespace {

bool all_zero(std::span<const float> values) {
  return std::ranges::all_of(values, [](float value) { return value == 0; });
}

// Something is to be put into the bucket's residual.
void hold(Bucket& bucket) {
  if (bucket.residual == nullptr) bucket.residual = Memory::plain(bucket.count * sizeof(float));
  bucket.holds = true;
}

}  // namespace

// Residuals belong to parameters, whatever bucket they are in.
void Reducer::keep_residuals(const std::vector<Bucket>& old) {
  for (const Bucket& bucket : old) {
    for (const Bucket::Slot& slot : bucket.slots) {
      const Place& place = place_[slot.param];
      Bucket& now = buckets_[place.bucket];
      const size_t bytes = params_[slot.param].count * sizeof(float), to = now.slots[place.slot].offset_bytes;
      const bool stays = to == slot.offset_bytes && now.count == bucket.count;  // in the same rank's share
      const bool scatters = !stays && comm_->as_made().shares_encoding();
      if (now.velocity != nullptr && bucket.velocity != nullptr) {
        std::memcpy(now.velocity->data() + to, bucket.velocity->data() + slot.offset_bytes, bytes);
        now.scattered_velocity |= bucket.scattered_velocity || scatters;
      }
      if (!bucket.holds) continue;
      hold(now);
      std::memcpy(now.residual->data() + to, bucket.residual->data() + slot.offset_bytes, bytes);
      now.scattered |= bucket.scattered || scatters;
    }
  }
}

// A step's share of the elements, in warm-up: from a quarter down to the ratio, geometrically (Y. Lin et al., "Deep
// Gradient Compression", 2018, section 3.3).
Encoding Reducer::encoding_now() const {
  if (rounds_.ended() < options_.start_step) return {};
  Encoding encoding = options_.encoding;
  constexpr double kFirst = 0.25;
  const size_t round = rounds_.ended() - options_.start_step;
  if (encoding.codec != Codec::kTopK || encoding.ratio >= kFirst || round >= options_.warmup_steps) return encoding;
  const double left = 1 - static_cast<double>(round) / static_cast<double>(options_.warmup_steps);
  encoding.ratio = static_cast<float>(encoding.ratio * std::pow(kFirst / encoding.ratio, left));
  return encoding;
}

// The residual is what was lost behind the prescale; the gradients are in front of it. Left behind: zeros. What goes
// through a velocity comes out 1 / (1 - momentum) times, by and by.
void Reducer::add_scattered(Bucket& bucket) const {
  if (!std::exchange(bucket.scattered, false) || !bucket.holds) return;
  std::byte* const residual = bucket.residual->data();
  const size_t count = bucket.flags_offset;
  const double factor = (bucket.velocity == nullptr ? 1.0 : 1.0 - options_.momentum) / options_.prescale;
  if (factor != 1.0) kernels::scale(residual, residual, count, DType::kFloat32, factor);
  kernels::reduce2(bucket.wire->data(), bucket.wire->data(), residual, count, DType::kFloat32, ReduceOp::kSum);
  std::memset(residual, 0, count * sizeof(float));
  bucket.holds = false;
}

void Reducer::give_feedback(Bucket& bucket, Request& request) const {
  add_scattered(bucket);
  const auto floats = [](const std::shared_ptr<Memory>& memory) {
    return memory == nullptr ? nullptr : reinterpret_cast<float*>(memory->data());
  };
  float* const velocity = floats(bucket.velocity);
  if (velocity != nullptr) std::fill_n(velocity + bucket.flags_offset, bucket.slots.size(), 0.0f);  // flags have none
  request.feedback = {.error = floats(bucket.residual),
                      .velocity = velocity,
                      .momentum = static_cast<float>(options_.momentum),
                      .empty = !bucket.holds,
                      .scattered = bucket.scattered_velocity};
  bucket.holds = bucket.residual != nullptr;  // until it is known better
}

// After its operation has ended well. A bucket that is never encoded has sent what it was given to keep.
void Reducer::note_kept(Bucket& bucket) const {
  bucket.holds &= bucket.operation->encoded;
  bucket.scattered_velocity = !bucket.operation->encoded && comm_->as_made().shares_encoding();
  if (!bucket.holds && !bucket.own_flags) bucket.residual = nullptr;
}

// Before its bucket is sent.
void Reducer::hold_back(size_t bucket, size_t slot) {
  const Bucket& of = buckets_[bucket];
  const Bucket::Slot& at = of.slots[slot];
  const auto take = [&](const std::shared_ptr<Memory>& memory) {
    if (memory == nullptr) return std::vector<float>();
    auto* const begin = reinterpret_cast<float*>(memory->data() + at.offset_bytes);
    const std::vector<float> taken(begin, begin + params_[at.param].count);
    std::fill_n(begin, taken.size(), 0.0f);
    return taken;
  };
  held_.push_back({bucket, slot, take(of.residual), take(of.velocity), of.scattered});
}

// To what was lost meanwhile, where this rank encodes for others. Later, where a wait was broken off and the operation
// still works on that.
void Reducer::give_back() {
  std::erase_if(held_, [this](const Held& held) {
    Bucket& bucket = buckets_[held.bucket];
    if (bucket.operation != nullptr && !bucket.operation->released()) return false;
    const size_t offset = bucket.slots[held.slot].offset_bytes;
    const auto add = [&](const std::shared_ptr<Memory>& memory, const std::vector<float>& values) {
      if (all_zero(values)) return;
      std::byte* const to = memory->data() + offset;
      kernels::reduce2(to, to, values.data(), values.size(), DType::kFloat32, ReduceOp::kSum);
    };
    if (!all_zero(held.error)) hold(bucket);
    add(bucket.residual, held.error);
    add(bucket.velocity, held.velocity);
    bucket.scattered |= held.scattered;
    return true;
  });
}

std::vector<float> Reducer::kept(size_t param, Kept what) const {
  const Place& place = place_.at(param);
  const Bucket& bucket = buckets_[place.bucket];
  const std::shared_ptr<Memory>& memory = what == Kept::kError ? bucket.residual : bucket.velocity;
  if (memory == nullptr) return {};
  std::vector<float> values(params_[param].count);
  const std::byte* const from = memory->data() + bucket.slots[place.slot].offset_bytes;
  kernels::scale(values.data(), from, values.size(), DType::kFloat32, 1.0 / options_.prescale);
  return values;
}

void Reducer::keep(size_t param, Kept what, std::span<const float> values) {
  const Place& place = place_.at(param);
  Bucket& bucket = buckets_[place.bucket];
  const bool is_error = what == Kept::kError;
  if (is_error ? bucket.wire_dtype != DType::kFloat32 : bucket.velocity == nullptr) return;
  if (is_error && bucket.residual == nullptr && all_zero(values)) return;
  if (values.size() != params_[param].count) {
    throw ArgumentError("What encoding lost of '" + params_[param].name + "' has " + std::to_string(values.size()) +
                        " elements, but the parameter has " + std::to_string(params_[param].count) +
                        ". Load the state of the same model.");
  }
  settle([&](Operation& operation) { comm_->wait_for(operation, -1); });
  give_back();
  if (is_error) hold(bucket);
  std::byte* const to = (is_error ? bucket.residual : bucket.velocity)->data() + bucket.slots[place.slot].offset_bytes;
  kernels::scale(to, values.data(), values.size(), DType::kFloat32, options_.prescale);
  (is_error ? bucket.scattered : bucket.scattered_velocity) |= comm_->as_made().shares_encoding();
}

}  // namespace dcoll
