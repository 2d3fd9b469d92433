// What encoding lost, kept for the next backward: Reducer's part that knows residuals and velocities.
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "engine/buckets/bucket.h"
#include "kernels/reduce.h"

namespace dcoll {

// Residuals belong to parameters, whatever bucket they are in.
void Reducer::keep_residuals(const std::vector<Bucket>& old) {
  for (const Bucket& bucket : old) {
    for (const Bucket::Slot& slot : bucket.slots) {
      const Place& place = place_[slot.param];
      Bucket& now = buckets_[place.bucket];
      const size_t bytes = params_[slot.param].count * sizeof(float), to = now.slots[place.slot].offset_bytes;
      if (bucket.residual == nullptr || now.residual == nullptr) continue;
      std::memcpy(now.residual->data() + to, bucket.residual->data() + slot.offset_bytes, bytes);
      const bool stays = to == slot.offset_bytes && now.count == bucket.count;  // in the same rank's share
      now.scattered |= bucket.scattered || (!stays && comm_->as_made().shares_encoding());
      if (now.velocity != nullptr && bucket.velocity != nullptr) {
        std::memcpy(now.velocity->data() + to, bucket.velocity->data() + slot.offset_bytes, bytes);
      }
    }
  }
}

// Gradients go as they are, and what is kept, from a checkpoint say, goes with the first.
bool Reducer::is_starting() const { return rounds_ < options_.start_step; }

// A step's share of the elements, in warm-up: from a quarter down to the ratio, geometrically (Y. Lin et al., "Deep
// Gradient Compression", 2018, section 3.3).
Encoding Reducer::encoding_now() const {
  if (is_starting()) return {};
  Encoding encoding = options_.encoding;
  constexpr double kFirst = 0.25;
  const size_t round = rounds_ - options_.start_step;
  if (encoding.codec != Codec::kTopK || encoding.ratio >= kFirst || round >= options_.warmup_steps) return encoding;
  const double left = 1 - static_cast<double>(round) / static_cast<double>(options_.warmup_steps);
  encoding.ratio = static_cast<float>(encoding.ratio * std::pow(kFirst / encoding.ratio, left));
  return encoding;
}

// The residual is what was lost behind the prescale; the gradients are in front of it. Left behind: zeros. What goes
// through a velocity comes out 1 / (1 - momentum) times, by and by.
void Reducer::add_scattered(Bucket& bucket) const {
  if (!std::exchange(bucket.scattered, false)) return;
  std::byte* const residual = bucket.residual->data();
  const size_t count = bucket.flags_offset;
  const double factor = (bucket.velocity == nullptr ? 1.0 : 1.0 - options_.momentum) / options_.prescale;
  if (factor != 1.0) kernels::scale(residual, residual, count, DType::kFloat32, factor);
  kernels::reduce2(bucket.wire->data(), bucket.wire->data(), residual, count, DType::kFloat32, ReduceOp::kSum);
  std::memset(residual, 0, count * sizeof(float));
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
  const std::shared_ptr<Memory>& memory = what == Kept::kError ? bucket.residual : bucket.velocity;
  if (memory == nullptr) return;
  if (values.size() != params_[param].count) {
    throw ArgumentError("What encoding lost of '" + params_[param].name + "' has " + std::to_string(values.size()) +
                        " elements, but the parameter has " + std::to_string(params_[param].count) +
                        ". Load the state of the same model.");
  }
  settle([&](Operation& operation) { comm_->wait_for(operation, -1); });
  std::byte* const to = memory->data() + bucket.slots[place.slot].offset_bytes;
  kernels::scale(to, values.data(), values.size(), DType::kFloat32, options_.prescale);
  bucket.scattered = comm_->as_made().shares_encoding() || is_starting();
}

}  // namespace dcoll
