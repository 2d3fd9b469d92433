#include "transport/mpi/notices.h"

#include <algorithm>

namespace dcoll::mpi {

MpiNotices::MpiNotices(MPI_Comm parent, RequestSet& requests) : requests_(requests) {
  check_mpi(MPI_Comm_dup(parent, &comm_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
  for (auto& inbox : inboxes_) inbox.resize(kMostBytes);
  listen(kFailure);
  listen(kStall);
  listen(kNote);
}

void MpiNotices::listen(Topic topic) {
  Transfer& op = receives_[static_cast<size_t>(topic)];
  op = {.kind = Transfer::Kind::kNoticeReceive, .peer = -1, .channel = topic, .bytes = kMostBytes};
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Irecv(inboxes_[static_cast<size_t>(topic)].data(), static_cast<int>(kMostBytes), MPI_BYTE,
                      MPI_ANY_SOURCE, topic, comm_, &request),
            "MPI receive of notices");
  requests_.add(request, op);
}

MpiNotices::Sent& MpiNotices::keep(std::vector<std::byte> notice) {
  std::erase_if(sent_, [](const auto& old) {
    return std::all_of(old->sends.begin(), old->sends.end(), [](const Transfer& op) { return op.done; });
  });
  sent_.push_back(std::make_unique<Sent>());
  sent_.back()->notice = std::move(notice);
  sent_.back()->sends.reserve(static_cast<size_t>(size_));  // they keep their addresses
  return *sent_.back();
}

void MpiNotices::send(Sent& sent, int peer, Topic topic) {
  Transfer op{.kind = Transfer::Kind::kNoticeSend, .peer = peer, .channel = topic};
  MPI_Request request = MPI_REQUEST_NULL;
  // An error is not reported: the peer that cannot be reached may be the failure itself, the others still must hear.
  if (MPI_Isend(sent.notice.data(), static_cast<int>(sent.notice.size()), MPI_BYTE, peer, topic, comm_, &request) ==
      MPI_SUCCESS) {
    requests_.add(request, sent.sends.emplace_back(std::move(op)));
  }
}

void MpiNotices::tell_everybody(Topic topic, std::vector<std::byte> notice) {
  Sent& sent = keep(std::move(notice));
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) send(sent, peer, topic);
  }
}

void MpiNotices::post_failure(const std::string& text) {
  if (failure_posted_) return;
  failure_posted_ = true;
  tell_everybody(kFailure, as_notice(text.empty() ? "unknown failure" : text));
}

void MpiNotices::post_note(int peer, const std::string& text) {
  if (!text.empty()) send(keep(as_notice(text)), peer, kNote);
}

void MpiNotices::post_stall(const std::vector<int>& waits_for) {
  if (!waits_for.empty()) tell_everybody(kStall, as_notice(waits_for));
}

void MpiNotices::finish(const RequestSet::Completed& completed) {
  completed.operation->done = true;
  if (completed.operation->kind == Transfer::Kind::kNoticeSend) return;
  check_mpi(completed.code, *completed.operation);
  int bytes = 0;
  MPI_Get_count(&completed.status, MPI_BYTE, &bytes);
  const auto topic = static_cast<Topic>(completed.operation->channel);
  hear(topic, completed.status.MPI_SOURCE, inboxes_[topic].data(), static_cast<size_t>(bytes));
  if (topic != kFailure) listen(topic);  // the first failure counts, there is nothing more to hear
}

void MpiNotices::close(bool clean) noexcept {
  if (clean) {
    MPI_Comm_free(&comm_);
    return;
  }
  for (auto& inbox : inboxes_) keep_forever(std::move(inbox));
  for (const auto& sent : sent_) keep_forever(std::move(sent->notice));
}

}  // namespace dcoll::mpi
