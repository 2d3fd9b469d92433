#include "engine/buckets/grouped.h"

#include <algorithm>
#include <span>
#include <utility>

#include "engine/buckets/group_text.h"

namespace dcoll {
namespace {

// Groups of equal total size but other tensors must not meet. What ranks compare are names, so the tensors are part of
// the name, and all of them of the name of each part.
std::string text_of(const std::vector<GroupTensor>& tensors) {
  const auto text = [&](size_t i) {
    const std::string size = compared(tensors[i].dims) ? dims_text(tensors[i].dims) : std::to_string(tensors[i].count);
    return size + " " + std::string(dtype_name(tensors[i].dtype));
  };
  return group_text(tensors.size(), text, [&](Fingerprint& all, size_t i) {
    const Dims dims = compared(tensors[i].dims) ? tensors[i].dims : Dims();
    all.add(static_cast<uint64_t>(tensors[i].dtype) | uint64_t{dims.size()} << 8, tensors[i].count);
    add_dims(all, dims);
  });
}

// Whether memory is in two of the segments: the same tensor twice, or a view of another.
bool overlap(const std::vector<kernels::Segment>& segments) {
  std::vector<std::span<const std::byte>> places;
  places.reserve(segments.size());
  for (const kernels::Segment& segment : segments) {
    if (segment.bytes > 0) places.emplace_back(static_cast<const std::byte*>(segment.tensor), segment.bytes);
  }
  const auto address = [](const auto& place) { return place.data(); };
  if (!std::ranges::is_sorted(places, std::less<>(), address)) std::ranges::sort(places, std::less<>(), address);
  return std::ranges::adjacent_find(
             places, [](const auto& a, const auto& b) { return a.data() + a.size() > b.data(); }) != places.end();
}

}  // namespace

GroupedAllReduce::GroupedAllReduce(std::shared_ptr<Communicator> comm, const std::vector<GroupTensor>& tensors,
                                   const Call& options)
    : comm_(std::move(comm)),
      options_(options),
      given_name_(options.name),
      tensors_(text_of(tensors)),
      name_(given_name_ + "[" + tensors_ + "]") {
  for (const GroupTensor& tensor : tensors) {
    Part& part = part_of(tensor.dtype, tensors.size());
    const size_t bytes = tensor.count * dtype_bytes(tensor.dtype);
    part.inputs.push_back({tensor.in, part.bytes, bytes});
    part.outputs.push_back({tensor.out, part.bytes, bytes});
    part.bytes += bytes;
    bytes_ += bytes;
  }
}

GroupedAllReduce::Part& GroupedAllReduce::part_of(DType dtype, size_t tensors) {
  for (Part& part : parts_) {
    if (part.dtype == dtype) return part;
  }
  parts_.emplace_back();
  parts_.back().dtype = dtype;
  if (parts_.size() == 1) {  // mostly all are of one dtype
    parts_.back().inputs.reserve(tensors);
    parts_.back().outputs.reserve(tensors);
  }
  return parts_.back();
}

void GroupedAllReduce::pack(Submit how) {
  for (Part& part : parts_) {
    // Before anything is sent: no part without the others.
    if (!call_of(part).plainly_valid(comm_->size())) request_of(part).validate(comm_->size());
    part.memory = comm_->scratch(part.bytes);
    if (how == Submit::kNow) {
      pack_others(part);
    } else {
      kernels::pack(part.memory->data(), part.inputs);
    }
  }
}

// All but the slice that this rank reads by itself.
void GroupedAllReduce::pack_others(Part& part) {
  part.own = own_slice(comm_->as_made(), call_of(part));
  kernels::pack_range(part.memory->data(), part.inputs, 0, part.own.begin);
  kernels::pack_range(part.memory->data(), part.inputs, part.own.end, part.bytes);
  // Of several dtypes, the second may still fail. And what is written must not be read once more.
  part.into_tensors =
      part.own.size() > 0 && parts_.size() == 1 &&
      std::ranges::equal(part.inputs, part.outputs, {}, &kernels::Segment::tensor, &kernels::Segment::tensor) &&
      !overlap(part.inputs);
}

void GroupedAllReduce::unpack(const Part& part) {
  const std::byte* flat = part.memory->data();
  if (!part.into_tensors) return kernels::unpack(part.outputs, flat);
  kernels::unpack_range(part.outputs, flat, 0, part.own.begin);
  kernels::unpack_range(part.outputs, flat, part.own.end, part.bytes);
}

Call GroupedAllReduce::call_of(const Part& part) const {
  Call call = options_;
  if (part.memory != nullptr) call.in = call.out = part.memory->data();
  call.count = part.bytes / dtype_bytes(part.dtype);
  call.dtype = part.dtype;
  call.name = name_;
  call.packed = true;
  if (part.own.size() > 0) call.tensors = part.inputs;
  call.into_tensors = part.into_tensors;
  return call;
}

Request GroupedAllReduce::request_of(const Part& part) const {
  Request request = Request::of(call_of(part), comm_->size());
  if (options_.op == ReduceOp::kAdasum) {  // has factors of its own for each tensor
    for (const kernels::Segment& segment : part.inputs)
      request.splits.push_back(segment.bytes / dtype_bytes(part.dtype));
  }
  return request;
}

// Groups of one name meet whatever is in them, so that a difference is a mismatch and not an endless wait: the tensors
// are part of the fingerprint instead of the name.
Request GroupedAllReduce::request_by_name(const Part& part) const {
  Request request = request_of(part);
  request.name = given_name_ + "/" + std::string(dtype_name(part.dtype));
  request.group = tensors_;
  return request;
}

void GroupedAllReduce::start(bool by_name) {
  for (Part& part : parts_) {
    part.operation = by_name ? comm_->submit_by_name(request_by_name(part), part.memory)
                             : comm_->submit(request_of(part), Communicator::Start::kInBackground, part.memory);
  }
}

void GroupedAllReduce::run(const std::function<void(Operation&)>& wait) {
  for (Part& part : parts_) {
    part.operation = options_.op == ReduceOp::kAdasum ? comm_->submit(request_of(part), Communicator::Start::kByWaiter)
                                                      : comm_->run_or_submit(call_of(part));
    if (part.operation == nullptr) continue;
    // Should the wait be interrupted: the memory, and where the tensors are.
    struct Kept {
      std::shared_ptr<Memory> memory;
      std::vector<kernels::Segment> inputs;
    };
    const auto kept = std::make_shared<Kept>(Kept{part.memory, std::move(part.inputs)});
    part.operation->keep = {kept, kept->memory.get()};
    wait(*part.operation);
  }
  unpack();
}

bool GroupedAllReduce::in_flight() const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return part.operation != nullptr && !part.operation->released(); });
}

bool GroupedAllReduce::done() const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [&](const Part& part) { return part.operation == nullptr || comm_->poll(*part.operation); });
}

void GroupedAllReduce::wait_for(const std::function<void(Operation&)>& wait) const {
  for (const Part& part : parts_) {
    if (part.operation != nullptr) wait(*part.operation);
  }
}

void GroupedAllReduce::unpack() {
  const MutexLock lock(unpack_mutex_);
  if (std::exchange(unpacked_, true)) return;
  for (Part& part : parts_) unpack(part);
  for (Part& part : parts_) {  // the memory may be used by the next group
    part.memory.reset();
    if (part.operation != nullptr && part.operation->released()) part.operation->keep.reset();
  }
}

}  // namespace dcoll
