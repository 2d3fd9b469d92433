#include "engine/collective/learn_constants.h"

#include <algorithm>
#include <span>
#include <vector>

#include "base/clock.h"
#include "engine/collective/by_schedule.h"
#include "engine/levels/hierarchical_agreement.h"
#include "engine/links/calibration.h"
#include "engine/links/coding.h"

namespace dcoll {
namespace {

// As the ranks of a job make them, one behind the other.
Task measure_handshake(Fabric& f, double& us) {
  constexpr int kFirst = 4, kTimes = 16;
  constexpr uint64_t kFingerprint = 0x68616e647368616b;  // every rank's, so they agree
  std::vector<double> times;
  for (int again = 0; again < kFirst + kTimes; ++again) {
    const auto begin = Clock::now();
    if (f.hierarchy != nullptr) {
      HierarchicalAgreement everybody(*f.hierarchy, kFingerprint, nullptr);
      co_await everybody;
    } else {
      Dissemination everybody(*f.transport, kFingerprint);
      co_await everybody;
    }
    if (again >= kFirst) times.push_back(1e6 * seconds_between(begin, Clock::now()));
  }
  std::ranges::nth_element(times, times.begin() + kTimes / 2);
  us = times[kTimes / 2];
}

// Rank 0's numbers for everybody.
Task learn_coding(Fabric& f, CalibrationSite site, kernels::Encoding encoding) {
  plan::Coding coding = measure_coding(encoding);
  co_await tell_everybody(site, std::as_writable_bytes(std::span(&coding, 1)));
  f.codings.add(encoding, coding);
}

Task learn_links(Fabric& f, CalibrationSite site) {
  LinkConstants& links = f.links;
  // Rank 0 alone looks: what others have may be of another time.
  enum Where : uint64_t { kNowhere, kOfTheJob, kInTheCache };
  struct Known {
    uint64_t found = kNowhere;
    plan::Constants constants;
  } known;
  std::string complaint;
  if (f.rank == 0) {
    if (const auto mine = links.known->get()) {
      known = {kOfTheJob, *mine};
    } else if (const auto measured = links.of_the_job->get()) {
      known = {kOfTheJob, *measured};
    }
  }
  if (f.rank == 0 && known.found == kNowhere && links.use == LinkConstants::Use::kCacheOrMeasure) {
    if (const auto cached = links.cache.load(complaint)) known = {kInTheCache, *cached};
    if (!complaint.empty() && links.patience == 1) links.log(LogLevel::kWarning, complaint);
  }
  co_await tell_everybody(site, std::as_writable_bytes(std::span(&known, 1)));
  if (known.found == kOfTheJob) {
    links.source = "the job's";
  } else if (known.found == kInTheCache) {
    links.source = links.cache.path();
  } else if (!links.may_measure) {
    links.until_asked = links.patience;
    links.patience *= 2;
    co_return;
  } else {
    const auto begin = Clock::now();
    known.constants = f.topology;
    co_await measure_handshake(f, known.constants.handshake_us);
    co_await measure_constants(site, known.constants);
    links.source = "measured in ";
    links.source += std::to_string(static_cast<int>(1e3 * seconds_between(begin, Clock::now()))) + " ms";
    complaint.clear();
    if (f.rank == 0 && !links.cache.store(known.constants, complaint) && !complaint.empty()) {
      links.log(LogLevel::kInfo, complaint);
    }
  }
  known.constants.shared_cores = f.topology.shared_cores;  // nothing to measure, and bindings may have changed
  static_cast<plan::Constants&>(f.topology) = known.constants;
  links.known->set(known.constants);
  f.forget_choices();
  if (f.hierarchy != nullptr) f.hierarchy->use(known.constants);
  links.learnt = true;
  if (f.rank == 0) links.log(LogLevel::kInfo, "link constants: " + links.source);
}

}  // namespace

Task learn_constants(Fabric& f, Call call) {
  const CalibrationSite site{f.transport, &f.topology, f.slice_bytes,
                             f.schedule(plan::Collective::kBroadcast, plan::Family::kBinomial)};
  const bool coding = wants_coding(f, call);
  if (f.links.use != LinkConstants::Use::kBuiltIn && !f.links.learnt) co_await learn_links(f, site);
  if (coding) co_await learn_coding(f, site, call.encoding);
}

}  // namespace dcoll
