#include "engine/buckets/bucket.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "base/error.h"
#include "kernels/cast.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"

namespace dcoll {
namespace {

constexpr size_t align(size_t bytes) { return round_up(bytes, Memory::kAlignment); }

// 0 or 1 in a floating dtype. Written for each parameter in every step, so by its bits rather than by a cast.
void write_flag(std::byte* flag, DType dtype, bool value) {
  constexpr uint16_t kHalf = 0x3c00, kBrain = 0x3f80;
  constexpr float kSingle = 1;
  constexpr double kDouble = 1;
  const void* one = dtype == DType::kFloat16    ? static_cast<const void*>(&kHalf)
                    : dtype == DType::kBFloat16 ? static_cast<const void*>(&kBrain)
                    : dtype == DType::kFloat32  ? static_cast<const void*>(&kSingle)
                                                : static_cast<const void*>(&kDouble);
  if (value) {
    std::memcpy(flag, one, dtype_bytes(dtype));
  } else {
    std::memset(flag, 0, dtype_bytes(dtype));
  }
}

bool is_zero(const std::byte* element, DType dtype) {
  const std::array<std::byte, sizeof(double)> zero{};
  return std::memcmp(element, zero.data(), dtype_bytes(dtype)) == 0;
}

bool has_schedule(const ReducerOptions& options) {
  return options.encoding && options.start_step + options.warmup_steps > 0;
}

}  // namespace

Reducer::Reducer(std::shared_ptr<Communicator> comm, std::vector<ParamInfo> params, const ReducerOptions& options)
    : comm_(std::move(comm)),
      params_(std::move(params)),
      options_(options),
      place_(params_.size()),
      ready_(params_.size(), 0),
      rounds_(comm_, "schedule of " + options.label, has_schedule(options) && comm_->as_made().may_encode(SIZE_MAX)) {
  if (options.op != ReduceOp::kSum && options.op != ReduceOp::kAverage) {
    throw ArgumentError("Gradients can be reduced with sum or average; got " + std::string(op_name(options.op)) + ".");
  }
  for (const ParamInfo& param : params_) {
    if (!is_floating(param.dtype)) {
      throw ArgumentError("Parameter '" + param.name + "' is " + std::string(dtype_name(param.dtype)) +
                          "; gradients are reduced in float16, bfloat16, float32 or float64. Leave it out.");
    }
  }
  if (!options.groups.empty() && options.groups.size() != params_.size()) {
    throw ArgumentError("Reducer needs a group for each parameter or none at all; got " +
                        std::to_string(options.groups.size()) + " for " + std::to_string(params_.size()) + ".");
  }
  if (options.wire.has_value() && (!is_floating(*options.wire) || dtype_bytes(*options.wire) != 2)) {
    throw ArgumentError("Gradients can be compressed to float16 or bfloat16; got " +
                        std::string(dtype_name(*options.wire)) + ".");
  }
  std::vector<size_t> order(params_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = order.size() - 1 - i;  // backward runs from the last layer
  fill_buckets(order);
  observed_ = order;
}

void Reducer::append(Bucket& bucket, size_t param) const {
  const ParamInfo& info = params_[param];
  size_t begin = 0;
  if (!bucket.slots.empty()) {
    const Bucket::Slot& last = bucket.slots.back();
    begin = align(last.offset_bytes + params_[last.param].count * dtype_bytes(info.dtype));
  }
  bucket.dtype = info.dtype;
  bucket.slots.push_back({param, begin});
}

// Fills buckets greedily in the given order, one open bucket per dtype. The first bucket closed is the small one.
std::vector<Bucket> Reducer::by_size(const std::vector<size_t>& order) const {
  std::vector<Bucket> filled;
  std::map<DType, Bucket> open;
  for (const size_t param : order) {
    const ParamInfo& info = params_[param];
    const size_t bytes = info.count * dtype_bytes(info.dtype);
    const size_t limit = filled.empty() ? options_.first_bucket_bytes : options_.bucket_bytes;
    Bucket& bucket = open[info.dtype];
    append(bucket, param);
    if (bucket.slots.size() > 1 && bucket.slots.back().offset_bytes + bytes > limit) {
      bucket.slots.pop_back();
      filled.push_back(std::move(bucket));
      bucket = Bucket{};
      append(bucket, param);
    }
  }
  for (auto& [dtype, bucket] : open) filled.push_back(std::move(bucket));
  return filled;
}

// A bucket per group and dtype, in the order in which they become full.
std::vector<Bucket> Reducer::by_group(const std::vector<size_t>& order) const {
  struct Growing {
    Bucket bucket;
    size_t full_at;
  };
  std::map<std::pair<size_t, DType>, Growing> groups;
  for (size_t i = 0; i < order.size(); ++i) {
    Growing& growing = groups[{options_.groups[order[i]], params_[order[i]].dtype}];
    append(growing.bucket, order[i]);
    growing.full_at = i;
  }
  std::vector<Growing> filled;
  for (auto& [key, growing] : groups) filled.push_back(std::move(growing));
  std::sort(filled.begin(), filled.end(), [](const Growing& a, const Growing& b) { return a.full_at < b.full_at; });
  std::vector<Bucket> buckets;
  for (Growing& growing : filled) buckets.push_back(std::move(growing.bucket));
  return buckets;
}

void Reducer::fill_buckets(const std::vector<size_t>& order) {
  std::vector<Bucket> filled = options_.groups.empty() ? by_size(order) : by_group(order);
  std::vector<Place> place(params_.size());
  for (size_t b = 0; b < filled.size(); ++b) {
    filled[b].name = name_of(filled[b], b);
    close_bucket(filled[b]);
    for (size_t s = 0; s < filled[b].slots.size(); ++s) place[filled[b].slots[s].param] = {b, s};
  }
  // Where there was no room, all is as before.
  const std::vector<Bucket> old = std::exchange(buckets_, std::move(filled));
  place_ = std::move(place);
  keep_residuals(old);
}

// Padding makes buckets of different parameters equally long, and a second Reducer has a bucket of each number too: the
// name is what ranks tell them apart by.
std::string Reducer::name_of(const Bucket& bucket, size_t index) const {
  std::string name = "bucket " + std::to_string(index);
  if (!options_.label.empty()) name += " of " + options_.label;
  name += ": " + params_[bucket.slots.front().param].name;
  const size_t more = bucket.slots.size() - 1;
  if (more > 0) name += " and " + std::to_string(more) + " more";
  return name;
}

// All parameters are known: place the flags and allocate.
void Reducer::close_bucket(Bucket& bucket) {
  const Bucket::Slot& last = bucket.slots.back();
  const size_t elem = dtype_bytes(bucket.dtype);
  bucket.flags_offset = align(last.offset_bytes + params_[last.param].count * elem) / elem;
  bucket.count = bucket.flags_offset + bucket.slots.size();
  const bool is_encoded = bucket.dtype == DType::kFloat32 && options_.encoding;
  bucket.encoded = is_encoded && comm_->as_made().may_encode(bucket.flags_offset * elem);
  const Codec codec = options_.encoding.codec;
  bucket.own_flags = bucket.encoded && (codec == Codec::kInt8 || codec == Codec::kTopK);
  if (bucket.own_flags && options_.feedback) bucket.residual = Memory::plain(bucket.count * elem);
  if (is_encoded && options_.momentum != 0) bucket.velocity = Memory::plain(bucket.count * elem);
  const bool narrow = !is_encoded && options_.wire.has_value() && elem > dtype_bytes(*options_.wire);
  bucket.wire_dtype = narrow ? *options_.wire : bucket.dtype;
  allocate(bucket);
}

void Reducer::allocate(Bucket& bucket) const {
  bucket.wire = comm_->alloc(bucket.count * dtype_bytes(bucket.wire_dtype));
  bucket.memory = bucket.compressed() ? Memory::plain(bucket.count * dtype_bytes(bucket.dtype)) : bucket.wire;
}

std::pair<std::shared_ptr<Memory>, size_t> Reducer::gradient(size_t param) const {
  const Place& place = place_.at(param);
  const Bucket& bucket = buckets_[place.bucket];
  const Bucket::Slot& slot = bucket.slots[place.slot];
  if (slot.own != nullptr) return {slot.own, 0};
  return {bucket.memory, slot.offset_bytes};
}

std::vector<size_t> Reducer::move(const std::vector<size_t>& params) {
  if (!arrived_.empty()) throw ArgumentError("move: a backward is in progress; call finish() first.");
  std::vector<Bucket> buckets = buckets_;          // where there is no room, nothing has moved
  std::vector<uint8_t> leaves(buckets.size(), 0);  // a bucket some of whose memory is lost
  std::vector<size_t> moved;
  for (const size_t param : params) {
    const Place& place = place_.at(param);
    Bucket::Slot& slot = buckets[place.bucket].slots[place.slot];
    if (slot.own == nullptr) leaves[place.bucket] = 1;
    slot.own = Memory::uninitialized(params_[param].count * dtype_bytes(params_[param].dtype));
    moved.push_back(param);
  }
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (!leaves[b]) continue;
    Bucket& bucket = buckets[b];
    allocate(bucket);
    for (size_t s = 0; s < bucket.slots.size(); ++s) {
      Bucket::Slot& slot = bucket.slots[s];
      if (slot.own != nullptr) continue;
      // The old block stays as long as any gradient in it is kept. So that this can happen only twice, all have memory
      // of their own the second time.
      const ParamInfo& info = params_[slot.param];
      if (bucket.moved) slot.own = Memory::uninitialized(info.count * dtype_bytes(info.dtype));
      moved.push_back(slot.param);
    }
    bucket.moved = true;
  }
  buckets_ = std::move(buckets);
  return moved;
}

bool Reducer::mark_ready(size_t param, const void* gradient) {
  if (ready_.at(param)) return false;
  ready_[param] = 1;
  arrived_.push_back(param);
  const Place& place = place_[param];
  Bucket& bucket = buckets_[place.bucket];
  if (arrived_.size() == 1) note_backward();
  pack(bucket, place.slot, gradient);
  write_flag(bucket.flag(place.slot), bucket.wire_dtype, true);
  if (++bucket.ready < bucket.slots.size() || place.bucket != next_ || rounds_.may_differ()) return true;
  // It may not be the only full one by now.
  for (; next_ + 1 < buckets_.size() && buckets_[next_].ready == buckets_[next_].slots.size(); ++next_) {
    submit(buckets_[next_]);
  }
  return true;
}

void Reducer::settle(const std::function<void(Operation&)>& wait) const {
  for (const Bucket& bucket : buckets_) {
    for (const auto& operation : {bucket.operation, bucket.flags_operation}) {
      if (operation == nullptr || operation->done.load(std::memory_order_acquire)) continue;
      try {
        wait(*operation);
      } catch (const Error&) {  // of a round that came to nothing
      }
    }
  }
}

// The first gradient of a backward.
void Reducer::note_backward() {
  settle([&](Operation& operation) { comm_->wait_for(operation, -1); });
  give_back();
  ++backwards_;
  Timeline& timeline = comm_->timeline();
  if (timeline.marks_cycles()) [[unlikely]]
    timeline.mark("backward " + std::to_string(backwards_), now_ns());
}

// Takes the gradient into its bucket: null where it was made where it belongs, which may be in the bucket.
void Reducer::pack(Bucket& bucket, size_t slot, const void* gradient) {
  if (gradient == nullptr) {
    if (!bucket.compressed() && bucket.slots[slot].own == nullptr) return;
    gradient = bucket.gradient(slot);
  }
  const ParamInfo& param = params_[bucket.slots[slot].param];
  const size_t bytes = param.count * dtype_bytes(bucket.dtype);
  Timeline& timeline = comm_->timeline();
  const int64_t begin = timeline.on() ? now_ns() : 0;
  if (bucket.compressed()) {
    kernels::cast(bucket.slot_on_wire(slot), bucket.wire_dtype, gradient, bucket.dtype, param.count);
  } else {
    kernels::stream_copy(bucket.slot_on_wire(slot), gradient, bytes);
  }
  if (begin != 0) [[unlikely]]
    timeline.span(bucket.name, "pack " + param.name, begin, now_ns(), bytes);
}

// What lies between gradients shares a block of the code with them, which one NaN makes NaNs altogether. Nobody else
// writes there, so it would stay.
void Reducer::clear_gaps(const Bucket& bucket) const {
  const size_t elem = dtype_bytes(bucket.dtype);
  for (size_t s = 0; s < bucket.slots.size(); ++s) {
    const size_t end = bucket.slots[s].offset_bytes / elem + params_[bucket.slots[s].param].count;
    const bool is_last = s + 1 == bucket.slots.size();
    const size_t next = is_last ? bucket.flags_offset : bucket.slots[s + 1].offset_bytes / elem;
    std::memset(bucket.on_wire(end), 0, (next - end) * dtype_bytes(bucket.wire_dtype));
  }
}

void Reducer::submit(Bucket& bucket) {
  Request request{.kind = Kind::kAllReduce,
                  .in = bucket.wire->data(),
                  .out = bucket.wire->data(),
                  .count = bucket.count,
                  .dtype = bucket.wire_dtype,
                  .op = options_.op,
                  .prescale = options_.prescale,
                  .postscale = options_.postscale,
                  .encoding = bucket.encoded ? encoding_now() : Encoding{},
                  .name = bucket.name};
  if (bucket.own_flags) {
    request.count = bucket.flags_offset;
    clear_gaps(bucket);
  }
  give_feedback(bucket, request);
  // All blocks are in use for as long as the operation is.
  const auto all = std::make_shared<std::array<std::shared_ptr<Memory>, 3>>(
      std::array{bucket.wire, bucket.residual, bucket.velocity});
  bucket.operation = comm_->submit(std::move(request), Communicator::Start::kInBackground,
                                   std::shared_ptr<Memory>(all, bucket.wire.get()));
  if (!bucket.own_flags) return;
  std::byte* const flags = bucket.flag(0);
  bucket.flags_operation = comm_->submit({.kind = Kind::kAllReduce,
                                          .in = flags,
                                          .out = flags,
                                          .count = bucket.slots.size(),
                                          .dtype = bucket.wire_dtype,
                                          .op = ReduceOp::kMax,
                                          .name = bucket.name + ", its flags"},
                                         Communicator::Start::kInBackground, bucket.wire);
}

void Reducer::flush() {
  for (; next_ < buckets_.size(); ++next_) {
    Bucket& bucket = buckets_[next_];
    for (size_t s = 0; s < bucket.slots.size(); ++s) {
      const size_t param = bucket.slots[s].param;
      if (ready_[param]) continue;
      std::memset(bucket.slot_on_wire(s), 0, params_[param].count * dtype_bytes(bucket.wire_dtype));
      write_flag(bucket.flag(s), bucket.wire_dtype, false);
      if (bucket.residual != nullptr || bucket.velocity != nullptr) hold_back(next_, s);
    }
    submit(bucket);
  }
}

void Reducer::agree_on_rounds(const std::function<void(Operation&)>& wait) {
  try {
    rounds_.agree(wait);
  } catch (const Error&) {
    throw;
  } catch (...) {  // Ctrl-C, of which the others know nothing: they wait for the buckets
    flush();
    throw;
  }
}

std::vector<size_t> Reducer::finish(const std::function<void(Operation&)>& wait) {
  try {
    if (rounds_.may_differ()) agree_on_rounds(wait);
    flush();
    wait_for_all(wait);
  } catch (...) {
    give_back();
    reset();
    throw;
  }
  give_back();
  std::vector<size_t> unused = unused_anywhere();
  observed_ = arrived_;
  for (const size_t param : missing()) observed_.push_back(param);
  reset();
  return unused;
}

// Brings gradients that do not lie on the wire from there to where they lie.
void Reducer::unpack(const Bucket& bucket) const {
  if (!bucket.compressed() && !bucket.moved) return;
  Timeline& timeline = comm_->timeline();
  const int64_t begin = timeline.on() ? now_ns() : 0;
  if (bucket.compressed())
    kernels::cast(bucket.memory->data(), bucket.dtype, bucket.wire->data(), bucket.wire_dtype, bucket.flags_offset);
  for (size_t s = 0; bucket.moved && s < bucket.slots.size(); ++s) {
    const Bucket::Slot& slot = bucket.slots[s];
    if (slot.own != nullptr)
      kernels::cast(slot.own->data(), bucket.dtype, bucket.slot_on_wire(s), bucket.wire_dtype,
                    params_[slot.param].count);
  }
  if (begin != 0) timeline.span(bucket.name, "unpack", begin, now_ns(), bucket.memory->bytes());
}

// All of them even if one fails: their memory is the caller's again only then. Throws the first failure.
void Reducer::wait_for_all(const std::function<void(Operation&)>& wait) {
  const auto begin = Clock::now();
  std::exception_ptr failure;
  for (Bucket& bucket : buckets_) {
    try {
      wait(*bucket.operation);
      note_kept(bucket);
      if (bucket.flags_operation != nullptr) wait(*bucket.flags_operation);
      unpack(bucket);
    } catch (const Error&) {
      if (!failure) failure = std::current_exception();
    }
  }
  const auto end = Clock::now();
  wait_seconds_ += seconds_between(begin, end);
  if (comm_->timeline().on()) comm_->timeline().span("waiting in backward", "wait", ns_of(begin), ns_of(end));
  if (failure) std::rethrow_exception(failure);
}

size_t Reducer::abandon() {
  size_t left = 0;
  for (size_t b = next_; b < buckets_.size(); ++b) left += buckets_[b].own_flags ? 2 : 1;
  if (rounds_.may_differ()) left = 1;  // in which ranks would agree: the others' rounds end there too
  reset();
  return left;
}

std::vector<size_t> Reducer::unused_anywhere() const {
  std::vector<size_t> unused;
  for (const size_t param : missing()) {
    const Place& place = place_[param];
    const Bucket& bucket = buckets_[place.bucket];
    if (is_zero(bucket.flag(place.slot), bucket.wire_dtype)) unused.push_back(param);
  }
  return unused;
}

void Reducer::reset() {
  std::fill(ready_.begin(), ready_.end(), uint8_t{0});
  arrived_.clear();
  for (Bucket& bucket : buckets_) bucket.ready = 0;
  next_ = 0;
  rounds_.end_one();
}

std::vector<size_t> Reducer::missing() const {
  std::vector<size_t> params;
  if (arrived_.size() == params_.size()) return params;
  for (size_t p = 0; p < params_.size(); ++p) {
    if (!ready_[p]) params.push_back(p);
  }
  return params;
}

std::vector<size_t> Reducer::order() const { return observed_; }

void Reducer::rebuild(const std::vector<size_t>& order) {
  std::vector<uint8_t> seen(params_.size(), 0);
  for (const size_t param : order) {
    if (param >= params_.size() || seen[param]++) {
      throw ArgumentError("rebuild: the order must name each parameter 0.." + std::to_string(params_.size()) +
                          " once; got " + std::to_string(param) + " twice or out of range.");
    }
  }
  if (order.size() != params_.size()) {
    throw ArgumentError("rebuild: the order names " + std::to_string(order.size()) + " of " +
                        std::to_string(params_.size()) + " parameters.");
  }
  if (!arrived_.empty()) throw ArgumentError("rebuild: a backward is in progress; call finish() first.");
  fill_buckets(order);
}

}  // namespace dcoll
