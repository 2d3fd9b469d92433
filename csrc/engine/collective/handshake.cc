#include "engine/collective/handshake.h"

namespace dcoll {
Handshake::Handshake(Fabric& f, Operation& op, const Call& call, Path path, const Entry& entry,
                     const ReduceJob* two_levels)
    : f_(f), op_(op), ticket_(entry.ticket), done_(entry.taken) {
  const Request& r = op.request;
  if (path == Path::kNodeDirect) {
    if (!entry.all_reduce) enter_all_reduce(f, call, r.fingerprint(), op.phases);
    everybody_ = f.all_reduce.get();
  } else if (f.size > 1 && f.board != nullptr) {
    if (ticket_ == 0) {
      ticket_ = path == Path::kPull ? Pull::enter(*f.board, *f.pull_slots, call)
                                    : f.board->post({r.fingerprint(), Window::kUnmapped, Window::kUnmapped, r.count});
    }
    everybody_ = &way_.emplace<BoardWait>(*f.board, ticket_);
  } else if (f.hierarchy != nullptr) {
    everybody_ = &way_.emplace<HierarchicalAgreement>(*f.hierarchy, r.fingerprint(), two_levels);
  } else if (f.size > 1) {
    everybody_ = &way_.emplace<Riding>(f, call, path, r.fingerprint()).everybody;
  }
}

bool Handshake::agreed() {
  if (done_ || everybody_ == nullptr) return true;
  if (const auto* levels = std::get_if<HierarchicalAgreement>(&way_)) {
    ticket_ = levels->ticket();
    done_ = levels->reduced();
    if (done_) {
      op_.phases.name_algorithm("hierarchical");
      op_.phases.enter(Phase::kMove);
    }
    return levels->equal();
  }
  if (const auto* riding = std::get_if<Riding>(&way_)) {
    if (riding->everybody.equal()) riding->rider.arrive(riding->everybody, op_);
    return riding->everybody.equal();
  }
  if (std::holds_alternative<BoardWait>(way_)) return f_.board->fingerprints_equal(ticket_);
  note_agreement(*f_.all_reduce, op_.phases);
  return f_.all_reduce->outcome() == NodeAllReduce::Outcome::kDone;
}

bool enters_inline(const Fabric& fabric, const Call& call) {
  if (fabric.board == nullptr || fabric.slots_posted != 0) return false;
  const Path path = path_by_host(fabric, call);
  return path == Path::kNodeDirect || path == Path::kPull || call.kind == Kind::kBarrier;
}

void enter_all_reduce(Fabric& fabric, const Call& call, uint64_t fingerprint, Phases& phases) {
  NodeAllReduce& all_reduce = *fabric.all_reduce;
  set_job(all_reduce.job(), call, fabric.size);
  all_reduce.job().timed = phases.on;
  phases.enter(Phase::kPack);
  all_reduce.enter(fingerprint);
  phases.enter_at(Phase::kAgree, all_reduce.entered_ns());
}

Span own_slice(const Fabric& fabric, const Call& call) {
  if (fabric.board == nullptr || path_by_host(fabric, call) != Path::kNodeDirect) return {};
  return fabric.all_reduce->own_slice(call);
}

void note_agreement(const NodeAllReduce& all_reduce, Phases& phases) {
  if (!phases.on) return;
  phases.enter_at(Phase::kMove, all_reduce.agreed_ns());
  phases.name_algorithm(all_reduce.form());
}

void set_job(ReduceJob& job, const Call& call, int size) {
  job.in = static_cast<const std::byte*>(call.in);
  job.out = static_cast<std::byte*>(call.out);
  job.count = call.count;
  job.dtype = call.dtype;
  job.op = call.op;
  job.prescale = call.prescale;
  job.postscale = final_scale(call.op, call.postscale, size);
  job.tensors = call.tensors;
  job.into_tensors = call.into_tensors;
}

}  // namespace dcoll
