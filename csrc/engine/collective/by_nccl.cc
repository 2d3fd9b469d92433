#include "engine/collective/by_nccl.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "base/hash.h"
#include "base/number.h"
#include "base/ranks_text.h"
#include "engine/collective/by_schedule.h"
#include "engine/collective/choose_path.h"
#include "engine/collective/handshake.h"
#include "engine/collective/mismatch.h"
#include "engine/collective/on_device.h"
#include "engine/collective/run_collective.h"
#include "engine/core/staging.h"
#include "transport/os/processes.h"

namespace dcoll {
namespace {

// How often ranks that wait for NCCL tell each other how far they are: one that has failed never comes.
constexpr double kTellSeconds = 0.1;
// What a rank shows beside the call when it cannot take part by NCCL.
constexpr uint64_t kElsewhere = 0x9e3779b97f4a7c15;

// What is summed is divided, or multiplied, by a kernel of ours: NCCL averages floating types alone, those of 16 bits
// by dividing what each rank brings, so that small values are lost of what is cast.
bool nccl_averages(const Call& call) {
  return call.op == ReduceOp::kAverage && is_floating(call.dtype) && !call.encoding;
}
double scale_after(const Call& call, int size) {
  return nccl_averages(call) ? call.postscale : final_scale(call.op, call.postscale, size);
}
ReduceOp nccl_op(const Call& call) {
  return call.op == ReduceOp::kAverage && !nccl_averages(call) ? ReduceOp::kSum : call.op;
}

// What one rank says of itself, and what becomes of its attempts.
struct Offer {
  int job_rank = 0;
  bool has_met = false, has_kernels = false;
  bool waited_in_vain = false;  // is why, and another rank may know more
  uint64_t gpu = 0;
  device::NcclId id{};  // the first one's
  std::array<char, 240> why{};
};

// What has to go well on every rank. DeviceError: why not, from here on.
template <typename Step>
void attempt(Offer& own, const Step& step) {
  std::string why;
  try {
    if (own.why[0] == '\0') why = step();
  } catch (const device::DeviceError& e) {
    why = e.what();
  }
  why.copy(own.why.data(), own.why.size() - 1);
}

// Why they do without NCCL; "": they need not.
std::string reason(std::vector<Offer>& offers) {
  std::map<uint64_t, int> rank_on;
  for (const bool in_vain : {false, true}) {
    for (Offer& one : offers) {
      one.why.back() = '\0';
      if (one.why[0] == '\0' || one.waited_in_vain != in_vain) continue;
      return "rank " + std::to_string(one.job_rank) + ": " + one.why.data();
    }
  }
  for (const Offer& one : offers) {
    const auto [first, is_first] = rank_on.emplace(one.gpu, one.job_rank);
    if (!is_first) return ranks_text({first->second, one.job_rank}) + " share a GPU, which NCCL refuses";
  }
  return "";
}

// Until the communicator has met the others, has failed, or it is time to hear of the others.
class Meeting final : public Pollable {
 public:
  Meeting(NcclState& nccl, Offer& own, Clock::time_point since) : nccl_(nccl), own_(own), since_(since) {}
  bool poll(bool& /*moved*/) override {
    const auto now = Clock::now();
    attempt(own_, [&] {
      own_.has_met = nccl_.comm->settled();
      own_.waited_in_vain = !own_.has_met && seconds_between(since_, now) > nccl_.patience_s;
      if (!own_.waited_in_vain) return std::string();
      return "NCCL's ranks have not met within " + text_of(nccl_.patience_s, 3) + " s (DCOLL_TIMEOUT)";
    });
    return own_.has_met || own_.why[0] != '\0' || seconds_between(begin_, now) > kTellSeconds;
  }

 private:
  NcclState& nccl_;
  Offer& own_;
  const Clock::time_point since_, begin_ = Clock::now();
};

// Nothing ends in a stream in which NCCL waits for ranks that do not come.
template <typename Step>
void or_abort(NcclState& nccl, const Step& step) {
  try {
    step();
  } catch (const device::DeviceError&) {
    nccl.comm->abort();
    throw;
  }
}

// What is under way in a stream of ours by NCCL.
class UnderNccl final : public Pollable {
 public:
  enum class Until { kBegun, kDone };
  UnderNccl(NcclState& nccl, Staging& staging, Until until) : nccl_(nccl), staging_(staging), until_(until) {}
  bool poll(bool& /*moved*/) override {
    bool settled = false;
    staging_.checked([&] { or_abort(nccl_, [&] { settled = nccl_.comm->settled(); }); });
    return settled && (until_ == Until::kBegun || staging_.arrived());
  }

 private:
  NcclState& nccl_;
  Staging& staging_;
  const Until until_;
};

// All ranks have agreed on that.
void do_without(Fabric& f, Staging& staging, const std::string& why, LogLevel level) {
  f.nccl->off = true;
  f.nccl->comm.reset();
  f.nccl->why = why;
  staging.lane().note_never_by_nccl();
  f.tell_for_all(level, "collectives on GPUs do not use NCCL: " + why);
}

// All ranks are in the same operation: the first.
Task meet(Fabric& f, Staging& staging, int number) {
  NcclState& nccl = *f.nccl;
  device::Device& device = device::device_of(number);
  Offer own{.job_rank = f.job_rank};
  attempt(own, [&] { return device::nccl_missing(number); });
  attempt(own, [&] {
    own.gpu = Fingerprint().add(own_machine()).add(device.place()).value();
    own.has_kernels = device.has_kernels();
    if (f.rank == 0) own.id = device::make_nccl_id(number);
    return std::string();
  });
  RecordExchange offers(f, own);
  co_await offers.executor;
  if (const std::string why = reason(offers.all); !why.empty()) {
    do_without(f, staging, why, LogLevel::kInfo);
    co_return;
  }
  attempt(own, [&] {
    nccl.stream = staging.lane().add_stream();
    nccl.comm = std::make_unique<device::Nccl>(device, offers.all[0].id, f.size, f.rank);
    return std::string();
  });
  const auto since = Clock::now();
  for (bool all_met = false; !all_met;) {
    Meeting others(nccl, own, since);
    co_await others;
    RecordExchange outcomes(f, own);
    co_await outcomes.executor;
    if (const std::string why = reason(outcomes.all); !why.empty()) {
      do_without(f, staging, why, LogLevel::kWarning);
      co_return;
    }
    all_met = std::ranges::all_of(outcomes.all, &Offer::has_met);
  }
  nccl.device = number;
  nccl.has_kernels = std::ranges::all_of(offers.all, &Offer::has_kernels);
  f.tell_for_all(LogLevel::kInfo, "collectives on GPUs use NCCL " + std::to_string(device::nccl_version()));
}

// Where the operand is, scaled.
const void* scaled(const Request& r, device::Device& device, device::Stream stream) {
  if (r.prescale == 1.0) return r.in;
  device.scale(r.out, r.in, r.count, r.dtype, r.prescale, stream);
  return r.out;
}

void begin(NcclState& nccl, const Operation& op, int size, device::Device& device, device::Stream stream) {
  const Request& r = op.request;
  const Call call = r.call();
  if (r.kind == Kind::kAllGather) return nccl.comm->all_gather(r.in, r.out, r.bytes(), stream);
  if (r.kind == Kind::kAllToAll) {
    const std::vector<size_t> sent = bytes_of_rows({r.splits.begin(), r.splits.end()}, r.row_elems);
    return nccl.comm->all_to_all(r.in, r.out, sent, bytes_of_rows(op.counts, r.row_elems), stream);
  }
  if (r.kind == Kind::kBroadcast) return nccl.comm->broadcast(r.in, r.out, r.bytes(), r.root, stream);
  if (r.kind == Kind::kReduceScatter) {
    const size_t share = r.count / static_cast<size_t>(size) * r.row_elems;
    return nccl.comm->reduce_scatter(r.in, r.out, share, r.dtype, nccl_op(call), stream);
  }
  nccl.comm->all_reduce(scaled(r, device, stream), r.out, r.count, r.dtype, nccl_op(call), stream);
}

void scale_result(const Request& r, int size, device::Device& device, device::Stream stream) {
  const double factor = scale_after(r.call(), size);
  const size_t ranks = r.kind == Kind::kReduceScatter ? static_cast<size_t>(size) : 1;
  if (reduces(r.kind) && factor != 1.0) {
    device.scale(r.out, r.out, r.count / ranks * r.row_elems, r.dtype, factor, stream);
  }
}

// Puts work into NCCL's stream.
template <typename Work>
void put(NcclState& nccl, Staging& staging, const Work& work) {
  staging.put([&](device::Device& device, device::Stream stream) { or_abort(nccl, [&] { work(device, stream); }); });
}

// An all-reduce of what the operand is cast to. As with NCCL's own sums of 16 bits, what is too great for them becomes
// infinity, for the program to see.
Task begin_cast(Fabric& f, Operation& op, std::byte* casts) {
  NcclState& nccl = *f.nccl;
  Staging& staging = *op.staging;
  const Request& r = op.request;
  const bool half = r.encoding.codec == kernels::Codec::kFloat16;
  const DType type = half ? DType::kFloat16 : DType::kBFloat16;
  op.phases.name_algorithm(half ? "NCCL of fp16" : "NCCL of bf16");
  UnderNccl begun(nccl, staging, UnderNccl::Until::kBegun);
  const void* in = nullptr;
  for (size_t at = 0; at < r.count; at += NcclState::kMostCast) {
    const size_t count = std::min(NcclState::kMostCast, r.count - at);
    put(nccl, staging, [&](device::Device& device, device::Stream stream) {
      if (at == 0) in = scaled(r, device, stream);
      device.cast(casts, type, static_cast<const float*>(in) + at, r.dtype, count, stream);
      nccl.comm->all_reduce(casts, casts, count, type, ReduceOp::kSum, stream);
    });
    co_await begun;
    put(nccl, staging, [&](device::Device& device, device::Stream stream) {
      device.cast(static_cast<float*>(r.out) + at, r.dtype, casts, type, count, stream);
    });
  }
}

// For stats().
void note_cast(Fabric& f, const Request& r, int64_t begin_ns) {
  EncodedCost cost{.calls = 1, .total_ns = now_ns() - begin_ns};
  const auto ranks = static_cast<size_t>(f.size);
  cost.note(r.count, ranks, 2 * (ranks - 1) * r.count * sizeof(uint16_t) / ranks);
  f.encoded_costs.add(r.name, r.encoding, cost);
}

// What a rank brings to an all-gather, and the length of the result for which it has room.
struct Part {
  int64_t rows;
  uint64_t room;
};

// How many rows come from whom. all_fit: whether every rank has room for just that, and all bring as many to a gather.
Task learn_sizes(Fabric& f, Operation& op, bool& all_fit) {
  const Request& r = op.request;
  const uint64_t room = r.out != nullptr ? r.out_bytes : 0;
  if (r.kind == Kind::kAllGather) {
    RecordExchange parts(f, Part{static_cast<int64_t>(r.count), room});
    co_await parts.executor;
    op.counts.clear();
    for (const Part& one : parts.all) op.counts.push_back(one.rows);
    const std::vector<size_t> bytes = bytes_of_rows(op.counts, r.row_elems);
    const size_t total = std::reduce(bytes.begin(), bytes.end());
    all_fit = total > 0 && std::ranges::all_of(parts.all, [&](const Part& one) {
                return one.room == total && one.rows == parts.all[0].rows;
              });
    co_return;
  }
  co_await exchange_counts(f, op);
  const std::vector<size_t> bytes = bytes_of_rows(op.counts, r.row_elems);
  const bool fits_here = r.out != nullptr && room == std::reduce(bytes.begin(), bytes.end());
  RecordExchange fits(f, uint8_t{fits_here});
  co_await fits.executor;
  all_fit = std::ranges::all_of(fits.all, [](uint8_t one) { return one != 0; });
}

// What keeps this rank from going by NCCL it tells the others. casts: memory for what is cast, where that is done.
bool can_take_part(Fabric& f, const Operation& op, void*& casts) {
  NcclState& nccl = *f.nccl;
  const Request& r = op.request;
  if (op.staging->goes_by_host()) return false;
  device::Device& device = device::device_of(r.device);
  if (nccl.comm != nullptr && nccl.device != r.device) {
    tell_of_host(f, "the tensor is on " + device.name() + ", and NCCL began with one on " +
                        device::device_of(nccl.device).name());
    return false;
  }
  if (!is_cast_on_device(f, r.call())) return true;
  try {
    casts = nccl.room_for_casts(device);
  } catch (const device::DeviceError& e) {
    tell_of_host(f, std::string("there is no memory for what is cast to 16 bits: ") + e.what());
  }
  return casts != nullptr;
}

// Whether both ways are there: by which it goes is found out.
bool is_timed(const Fabric& f, const Call& call) {
  return call.kind == Kind::kAllReduce && may_go_by_nccl(f, call) && !f.nccl->demanded && stays_on_device(f, call);
}

}  // namespace

bool nccl_has(const Call& call, int size) {
  if (call.device == device::kHost || call.packed || (call.encoding && !is_cast(call.encoding))) return false;
  if (call.kind == Kind::kBroadcast || is_ragged(call.kind)) return true;
  if (!reduces(call.kind) || !device::nccl_reduces(call.dtype, nccl_op(call))) return false;
  if (call.kind == Kind::kAllReduce) return true;
  return call.splits.empty() && call.count % static_cast<size_t>(size) == 0 && call.prescale == 1.0;
}

bool may_go_by_nccl(const Fabric& f, const Call& call) {
  if (f.nccl == nullptr || (f.nccl->off && !f.nccl->demanded)) return false;
  const bool scales = reduces(call.kind) && (call.prescale != 1.0 || scale_after(call, f.size) != 1.0);
  const bool needs_kernels = scales || is_cast_on_device(f, call);
  return call.algo.or_else(f.algo).takes_direct() && nccl_has(call, f.size) && (f.nccl->has_kernels || !needs_kernels);
}

bool goes_by_nccl(const Fabric& f, const Call& call) {
  return may_go_by_nccl(f, call) && !(is_timed(f, call) && f.nccl->choice(call.bytes()).takes_opened());
}

Task by_nccl(Fabric& f, Operation& op) {
  NcclState& nccl = *f.nccl;
  Staging& staging = *op.staging;
  const Request& r = op.request;
  const int64_t begin_ns = now_ns();  // as of the other way: to agree is a part of it
  if (nccl.off) throw device::DeviceError("DCOLL_GPU_ENGINE=nccl, but " + nccl.why);
  void* casts = nullptr;
  const bool fits = can_take_part(f, op, casts);
  op.phases.enter(Phase::kAgree);
  if (f.slots_posted != 0) co_await learn_slots(f);
  Operation shown({.kind = Kind::kBarrier, .stands_for = r.fingerprint() ^ (fits ? 0 : kElsewhere)});
  Handshake handshake(f, shown, shown.request.call(), Path::kMeeting, {}, nullptr);
  if (Pollable* everybody = handshake.everybody()) co_await *everybody;
  if (!handshake.agreed()) {
    co_await resolve_mismatch(f, op, Within::kDevice);
    co_return;
  }
  if (!fits) {
    co_await by_host(f, op);
    co_return;
  }
  if (nccl.comm == nullptr) {
    co_await meet(f, staging, r.device);
    if (nccl.off || !may_go_by_nccl(f, r.call())) {
      co_await on_device(f, op);
      co_return;
    }
  }
  if (is_ragged(r.kind)) {
    bool all_fit = false;
    co_await learn_sizes(f, op, all_fit);
    if (!all_fit) {
      co_await without_nccl(f, op);
      co_return;
    }
  }
  op.phases.enter(Phase::kMove);
  op.phases.name_algorithm("NCCL");
  UnderNccl begun(nccl, staging, UnderNccl::Until::kBegun), done(nccl, staging, UnderNccl::Until::kDone);
  staging.use(nccl.stream);
  staging.set_shown(true);
  if (casts != nullptr) {
    co_await begin_cast(f, op, static_cast<std::byte*>(casts));
  } else {
    put(nccl, staging, [&](auto& device, auto stream) { begin(nccl, op, f.size, device, stream); });
    co_await begun;
  }
  // Its event is behind what NCCL has begun by now.
  put(nccl, staging, [&](auto& device, auto stream) { scale_result(r, f.size, device, stream); });
  co_await done;
  staging.set_shown(false);
  if (casts != nullptr) note_cast(f, r, begin_ns);
  co_await note_timed(f, r.call(), begin_ns);
}

Task note_timed(Fabric& f, const Call& call, int64_t begin_ns) {
  if (!is_timed(f, call)) co_return;
  const size_t bytes = call.bytes();
  NcclState::Choice& choice = f.nccl->choice(bytes);
  if (choice.trial == nullptr) co_return;
  std::array<double, 2> medians{};
  co_await note_call(f, *choice.trial, bytes, begin_ns, medians);
  if (!choice.trial->is_done()) co_return;
  choice.trial.reset();
  choice.opened = medians[1] < medians[0];
  const auto us = [&](bool opened) { return std::to_string(medians[opened] * static_cast<double>(bytes)) + " us "; };
  f.tell_for_all(LogLevel::kInfo, "all-reduces of about " + std::to_string(bytes) + " bytes on GPUs go " +
                                      (choice.opened ? "in memory that ranks have opened" : "by NCCL") + ": " +
                                      us(true) + "there, " + us(false) + "by NCCL");
}

}  // namespace dcoll
