#include "transport/mpi/notices.h"

#include <algorithm>
#include <cstring>

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
  Operation& op = receives_[static_cast<size_t>(topic)];
  op.kind = Operation::Kind::kNoticeReceive;
  op.peer = -1;
  op.channel = topic;
  op.bytes = kMostBytes;
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Irecv(inboxes_[static_cast<size_t>(topic)].data(), static_cast<int>(kMostBytes), MPI_BYTE,
                      MPI_ANY_SOURCE, topic, comm_, &request),
            "MPI receive of notices");
  requests_.add(request, op);
}

MpiNotices::Sent& MpiNotices::keep(std::vector<std::byte> notice) {
  std::erase_if(sent_, [](const auto& old) {
    return std::all_of(old->sends.begin(), old->sends.end(), [](const Operation& op) { return op.done; });
  });
  sent_.push_back(std::make_unique<Sent>());
  sent_.back()->notice = std::move(notice);
  sent_.back()->sends.reserve(static_cast<size_t>(size_));  // they keep their addresses
  return *sent_.back();
}

void MpiNotices::send(Sent& sent, int peer, Topic topic) {
  Operation op;
  op.kind = Operation::Kind::kNoticeSend;
  op.peer = peer;
  op.channel = topic;
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

// At most kMostBytes of the text, in whole UTF-8 characters.
std::vector<std::byte> MpiNotices::as_notice(const std::string& text) {
  size_t bytes = std::min(text.size(), kMostBytes);
  while (bytes < text.size() && bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xC0) == 0x80) --bytes;
  const auto* characters = reinterpret_cast<const std::byte*>(text.data());
  return {characters, characters + bytes};
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
  const size_t count = std::min(waits_for.size(), kMostBytes / sizeof(int));
  if (count == 0) return;
  std::vector<std::byte> notice(count * sizeof(int));
  std::memcpy(notice.data(), waits_for.data(), notice.size());
  tell_everybody(kStall, std::move(notice));
}

void MpiNotices::finish(const RequestSet::Completed& completed) {
  completed.operation->done = true;
  if (completed.operation->kind == Operation::Kind::kNoticeSend) return;
  check_mpi(completed.code, *completed.operation);
  int bytes = 0;
  MPI_Get_count(&completed.status, MPI_BYTE, &bytes);
  if (completed.operation->channel == kFailure) {
    failure_.assign(reinterpret_cast<const char*>(inboxes_[kFailure].data()), static_cast<size_t>(bytes));
    return;  // the first one counts, there is nothing more to hear
  }
  if (completed.operation->channel == kNote) {
    notes_.push_back({completed.status.MPI_SOURCE,
                      std::string(reinterpret_cast<const char*>(inboxes_[kNote].data()), static_cast<size_t>(bytes))});
    return listen(kNote);
  }
  StallNote note{.rank = completed.status.MPI_SOURCE, .waits_for = {}, .heard = Clock::now()};
  note.waits_for.resize(static_cast<size_t>(bytes) / sizeof(int));
  std::memcpy(note.waits_for.data(), inboxes_[kStall].data(), note.waits_for.size() * sizeof(int));
  std::erase_if(stalls_, [&](const StallNote& old) { return old.rank == note.rank; });
  stalls_.push_back(std::move(note));
  listen(kStall);
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
