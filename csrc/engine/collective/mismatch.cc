#include "engine/collective/mismatch.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/error.h"
#include "base/ranks_text.h"
#include "engine/collective/join.h"
#include "engine/collective/run_collective.h"
#include "engine/watch/stall_report.h"

namespace dcoll {
namespace {

void copy_text(const std::string& text, char* to, size_t bytes) {
  std::memcpy(to, text.data(), std::min(text.size(), bytes - 1));
}

}  // namespace

RecordExchange::RecordExchange(Fabric& fabric, const void* mine, size_t bytes)
    : own(static_cast<const std::byte*>(mine), static_cast<const std::byte*>(mine) + bytes),
      all(bytes * fabric.size),
      executor(*fabric.transport, fabric.schedule(plan::Collective::kAllGather, "ring", 0),
               {.input = own.data(),
                .output = all.data(),
                .input_layout = Layout::even(bytes, 1),
                .output_layout = Layout::even(bytes * fabric.size, fabric.size)},
               fabric.slice_bytes) {}

Called Called::of(const Request& r) {
  Called call;
  // Rather the name's end is left out than what follows it.
  Request described = r;
  described.name = shortened(r.name, kWords / 2);
  copy_text(shortened(described.describe(), kWords - 1), call.words, kWords);
  call.standing.call = r.fingerprint();
  call.count = r.count;
  call.algo = r.algo.id();
  call.encoding = r.encoding;
  call.prescale = r.prescale;
  call.postscale = r.postscale;
  call.kind = r.kind;
  call.dtype = r.dtype;
  call.op = r.op;
  return call;
}

Request Called::stand_in() const {
  return {.kind = kind,
          .count = count,
          .dtype = dtype,
          .op = op,
          .prescale = prescale,
          .postscale = postscale,
          .algo = Algo::of_id(algo),
          .encoding = encoding,
          .stands_for = fingerprint()};
}

Mismatch::Mismatch(Fabric& fabric, const Operation& operation)
    : size_(fabric.size), records_([&]() -> RecordExchange {
        Called mine = Called::of(operation.request);
        mine.job_rank = fabric.job_rank;
        mine.standing = fabric.out_of_step.standing(operation.phases.number, mine.fingerprint());
        mine.standing.gives_way = !operation.request.refusal.empty();
        mine.standing.joined = mine.kind == Kind::kJoin;
        copy_text(shortened(fabric.out_of_step.reason(), Called::kWords - 1), mine.reason, Called::kWords);
        return RecordExchange(fabric, &mine, sizeof mine);
      }()) {}

Called Mismatch::call_of(int rank) const {
  Called call;
  std::memcpy(&call, records_.all.data() + static_cast<size_t>(rank) * sizeof call, sizeof call);
  return call;
}

std::string Mismatch::text() const {
  std::map<std::pair<std::string, uint64_t>, std::vector<int>> callers;  // words may be cut where calls still agree
  for (int rank = 0; rank < size_; ++rank) {
    const Called call = call_of(rank);
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

Task Mismatch::resolve(Fabric& fabric, Operation& operation) const {
  const bool in_join = operation.request.kind == Kind::kJoin;
  std::vector<int> joined;
  int example = -1;  // a rank that has not joined
  bool alike = true;
  for (int rank = 0; rank < size_; ++rank) {
    if (call_of(rank).kind == Kind::kJoin) {
      joined.push_back(rank);
    } else if (example < 0) {
      example = rank;
    } else {
      alike = alike && call_of(rank).fingerprint() == call_of(example).fingerprint();
    }
  }
  const Called call = call_of(example);
  const bool all_reduce = call.kind == Kind::kAllReduce && has_neutral(call);
  if (!joined.empty() && alike && all_reduce) {
    return in_join ? contribute_nothing(fabric, call) : run_collective(fabric, operation);
  }
  if (in_join) return nothing_to_do();  // the others' error, not this rank's
  if (!joined.empty() && alike) {
    throw JoinedError("The ranks cannot do this while some have joined: " + text() +
                      ". A rank that joined contributes to allreduce alone, but not with op=Adasum, nor to a product "
                      "of integers with a prescale factor. Nothing was moved "
                      "and the job can go on; "
                      "call the others before dcoll.join(), or after it.");
  }
  if (!operation.by_name) return resolve_in_order(fabric, operation);
  throw MismatchError("The ranks called different collectives: " + text() +
                      ". Nothing was moved and the job can go on; every rank must ask for the same under one name.");
}

// The ranks were in step, and called the same collective of as many elements: rather one call whose root, dtype or
// operator depends on the rank than different calls, one of which some rank has yet to make.
bool Mismatch::differs_in_arguments() const {
  const Called first = call_of(0);
  for (int rank = 0; rank < size_; ++rank) {
    const Called call = call_of(rank);
    if (call.kind != first.kind || call.count != first.count || call.standing.num_failed > 0) return false;
  }
  return true;
}

Task Mismatch::resolve_in_order(Fabric& fabric, Operation& operation) const {
  std::vector<Standing> standings;
  for (int rank = 0; rank < size_; ++rank) standings.push_back(call_of(rank).standing);
  const std::vector<Verdict> verdicts = line_up(standings);
  if (differs_in_arguments()) {
    for (Standing& standing : standings) standing.call = 0;  // not to be recognized
  }
  const auto self = static_cast<size_t>(fabric.rank);
  operation.counts_in_order = fabric.out_of_step.settle(operation.phases.number, standings, verdicts, self);
  switch (verdicts[self]) {
    case Verdict::kTryAgain:
      return run_collective(fabric, operation);
    case Verdict::kGivesWay:
      return nothing_to_do();
    case Verdict::kFails:
      break;
  }
  std::vector<int> ahead;
  for (int rank = 0; rank < size_; ++rank) {
    if (verdicts[static_cast<size_t>(rank)] == Verdict::kTryAgain) ahead.push_back(call_of(rank).job_rank);
  }
  throw MismatchError(
      "The ranks called different collectives: " + text() + ". Nothing was moved and the job can go on; " +
      (ahead.empty()
           ? "every rank must make the same calls in the same order."
           : ranks_text(ahead) + " skipped a call that this rank made. " + "With this error they are in step again."));
}

}  // namespace dcoll
