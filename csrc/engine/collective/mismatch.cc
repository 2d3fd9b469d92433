#include "engine/collective/mismatch.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/error.h"
#include "base/ranks_text.h"
#include "engine/collective/join.h"
#include "engine/collective/on_device.h"
#include "engine/collective/run_collective.h"
#include "engine/watch/stall_report.h"

namespace dcoll {
namespace {

void copy_text(const std::string& text, char* to, size_t bytes) {
  std::memcpy(to, text.data(), std::min(text.size(), bytes - 1));
}

constexpr size_t kMostCount = SIZE_MAX / 16;  // whose bytes are a number

// A peer's words come through memory that a stray write may have reached.
void check(Called& call, size_t rank) {
  call.words[Called::kWords - 1] = call.reason[Called::kWords - 1] = '\0';
  const kernels::Encoding& how = call.encoding;
  const bool has_ratio = how.codec != kernels::Codec::kTopK || (how.ratio > 0 && how.ratio <= 1);
  if (call.kind <= Kind::kJoin && static_cast<int>(call.dtype) < kNumDTypes &&
      static_cast<int>(call.op) < kNumReduceOps && static_cast<size_t>(how.codec) < kernels::kNumCodecs &&
      how.exchange <= kernels::Exchange::kOwners && has_ratio && call.count <= kMostCount) {
    return;
  }
  throw TransportError("rank " + std::to_string(rank) + " sent a call that there is not: shared memory is damaged");
}

// What this rank called.
Called own_call(Fabric& fabric, const Operation& operation) {
  const Request& r = operation.request;
  Called call;
  // Rather the name's end is left out than what follows it.
  Request described = r;
  described.name = shortened(r.name, Called::kWords / 2);
  copy_text(shortened(described.describe(), Called::kWords - 1), call.words, Called::kWords);
  call.job_rank = fabric.job_rank;
  call.standing = fabric.out_of_step.standing(operation.phases.number, r.fingerprint());
  copy_text(shortened(fabric.out_of_step.reason(), Called::kWords - 1), call.reason, Called::kWords);
  call.standing.gives_way = !r.refusal.empty();
  call.standing.joined = r.kind == Kind::kJoin;
  call.count = r.whole_count();
  call.device = r.device;
  call.algo = r.algo.id();
  call.encoding = r.encoding;
  call.prescale = r.prescale;
  call.postscale = r.postscale;
  call.kind = r.kind;
  call.dtype = r.dtype;
  call.op = r.op;
  return call;
}

std::string text_of(const std::vector<Called>& calls) {
  std::map<std::pair<std::string, uint64_t>, std::vector<int>> callers;  // words may be cut where calls still agree
  for (const Called& call : calls) {
    std::string words = call.words;
    if (call.reason[0] != '\0') words += " after a call there was refused (" + std::string(call.reason) + ")";
    callers[{words, call.fingerprint()}].push_back(call.job_rank);
  }
  std::vector<std::pair<std::vector<int>, std::string>> by_rank;
  for (const auto& [what, ranks] : callers) by_rank.emplace_back(ranks, what.first);
  std::sort(by_rank.begin(), by_rank.end());
  std::string text;
  for (size_t i = 0; i < by_rank.size(); ++i) {
    const auto& [ranks, what] = by_rank[i];
    text += (i ? "; " : "") + ranks_text(ranks) + (what.starts_with(kCouldNot) ? " " : " called ") + what;
    if (what == kind_name(Kind::kShutdown)) text += " (or the program there ended)";
  }
  return text;
}

// The ranks were in step, and called the same collective of as many elements: rather one call whose root, dtype or
// operator depends on the rank than different calls, one of which some rank has yet to make.
bool differ_in_arguments(const std::vector<Called>& calls) {
  const Called& first = calls.front();
  for (const Called& call : calls) {
    if (call.kind != first.kind || call.count != first.count || call.standing.num_failed > 0) return false;
  }
  return true;
}

// Whether ranks keep what it loses. One that joined has no room for that, though it may encode the sum of its whole
// node, and owns elements of everybody's: beside it everything goes in full.
bool keeps_errors(const Encoding& how) { return how.codec == Codec::kInt8 || how.codec == Codec::kTopK; }

Task again(Fabric& fabric, Operation& operation, Within within) {
  return within == Within::kDevice ? on_device(fabric, operation) : run_collective(fabric, operation);
}

Task resolve_in_order(Fabric& fabric, Operation& operation, Within within, const std::vector<Called>& calls) {
  std::vector<Standing> standings;
  for (const Called& call : calls) standings.push_back(call.standing);
  const std::vector<Verdict> verdicts = line_up(standings);
  if (differ_in_arguments(calls)) {
    for (Standing& standing : standings) standing.call = 0;  // not to be recognized
  }
  const auto self = static_cast<size_t>(fabric.rank);
  operation.counts_in_order = fabric.out_of_step.settle(operation.phases.number, standings, verdicts, self);
  switch (verdicts[self]) {
    case Verdict::kTryAgain:
      return again(fabric, operation, within);
    case Verdict::kGivesWay:
      return nothing_to_do();
    case Verdict::kFails:
      break;
  }
  std::vector<int> ahead;
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    if (verdicts[rank] == Verdict::kTryAgain) ahead.push_back(calls[rank].job_rank);
  }
  throw MismatchError(
      "The ranks called different collectives: " + text_of(calls) + ". Nothing was moved and the job can go on; " +
      (ahead.empty()
           ? "every rank must make the same calls in the same order."
           : ranks_text(ahead) + " skipped a call that this rank made. " + "With this error they are in step again."));
}

// How the operation goes on here.
Task resolve(Fabric& fabric, Operation& operation, Within within, const std::vector<Called>& calls) {
  const bool in_join = operation.request.kind == Kind::kJoin;
  const auto has_joined = [](const Called& call) { return call.kind == Kind::kJoin; };
  const auto example = std::ranges::find_if_not(calls, has_joined);
  const bool any_joined = std::ranges::any_of(calls, has_joined);
  const bool alike = std::ranges::all_of(
      calls, [&](const Called& call) { return has_joined(call) || call.fingerprint() == example->fingerprint(); });
  if (any_joined && alike && example->kind == Kind::kAllReduce && has_neutral(*example)) {
    if (in_join) return contribute_nothing(fabric, *example);
    operation.request.in_full = keeps_errors(example->encoding);
    // What a rank that joined contributes is in the host's memory.
    return within == Within::kDevice ? by_host(fabric, operation) : run_collective(fabric, operation);
  }
  // Some rank could not take part by NCCL.
  if (within == Within::kDevice && alike && !any_joined) return by_host(fabric, operation);
  if (in_join) return nothing_to_do();  // the others' error, not this rank's
  if (any_joined && alike) {
    throw JoinedError("The ranks cannot do this while some have joined: " + text_of(calls) +
                      ". A rank that joined contributes to allreduce alone, but not with op=Adasum, nor to a product "
                      "of integers with a prescale factor. Nothing was moved and the job can go on; call the others "
                      "before dcoll.join(), or after it.");
  }
  if (!operation.by_name) return resolve_in_order(fabric, operation, within, calls);
  throw MismatchError("The ranks called different collectives: " + text_of(calls) +
                      ". Nothing was moved and the job can go on; every rank must ask for the same under one name.");
}

}  // namespace

Request Called::stand_in() const {
  return {.kind = kind,
          .count = count,
          .dtype = dtype,
          .op = op,
          .prescale = prescale,
          .postscale = postscale,
          .algo = Algo::of_id(algo),
          .encoding = encoding,
          .in_full = keeps_errors(encoding),
          .stands_for = fingerprint(),
          .device = device};
}

Task resolve_mismatch(Fabric& fabric, Operation& operation, Within within) {
  RecordExchange calls(fabric, own_call(fabric, operation));
  co_await calls.executor;
  for (size_t rank = 0; rank < calls.all.size(); ++rank) check(calls.all[rank], rank);
  co_await resolve(fabric, operation, within, calls.all);
}

}  // namespace dcoll
