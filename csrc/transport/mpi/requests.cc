#include "transport/mpi/requests.h"

#include <sched.h>

#include <algorithm>

#include "base/error.h"

namespace dcoll::mpi {

void check_mpi(int code, const std::string& what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = 0;
  throw TransportError(
      what + " failed: " +
      (length > 0 ? std::string(text, static_cast<size_t>(length)) : "MPI error " + std::to_string(code)));
}

bool is_process_failure(int code) {
#if defined(MPI_ERR_PROC_FAILED) && defined(MPI_ERR_PROC_FAILED_PENDING)  // Open MPI's names
  int kind = MPI_SUCCESS;
  if (code == MPI_SUCCESS || MPI_Error_class(code, &kind) != MPI_SUCCESS) return false;
  return kind == MPI_ERR_PROC_FAILED || kind == MPI_ERR_PROC_FAILED_PENDING;
#else
  return static_cast<void>(code), false;
#endif
}

bool ProcessFailure::noted(int code, const Transfer& op) {
  if (!is_process_failure(code)) return false;
  if (text_.empty()) {
    text_ = about(op, "MPI") + " failed: a process has ended";
    since_ = std::chrono::steady_clock::now();
  }
  return true;
}

void ProcessFailure::check() const {
  constexpr std::chrono::seconds kPatience{1};
  if (!text_.empty() && std::chrono::steady_clock::now() - since_ > kPatience) throw PeerError(text_);
}

const std::vector<RequestSet::Completed>& RequestSet::test() {
  completed_.clear();
  if (requests_.empty()) return completed_;
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int count = 0, code = MPI_SUCCESS;
  // Open MPI looks first and moves messages then, so what has just arrived is only told to the second call. Whoever
  // goes to sleep after the first one sleeps beside a finished message.
  for (int look = 0; look < 2 && count == 0; ++look) {
    code =
        MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, indices_.data(), statuses_.data());
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) check_mpi(code, "MPI_Testsome");
  }
  if (count == MPI_UNDEFINED || count == 0) return completed_;
  for (int i = 0; i < count; ++i) {
    const MPI_Status& status = statuses_[static_cast<size_t>(i)];
    Transfer*& operation = operations_[static_cast<size_t>(indices_[static_cast<size_t>(i)])];
    completed_.push_back({operation, status, code == MPI_SUCCESS ? MPI_SUCCESS : status.MPI_ERROR});
    operation = nullptr;
  }
  size_t kept = 0;
  for (size_t i = 0; i < operations_.size(); ++i) {
    if (operations_[i] == nullptr) continue;
    requests_[kept] = requests_[i];
    operations_[kept++] = operations_[i];
  }
  requests_.resize(kept);
  operations_.resize(kept);
  return completed_;
}

bool RequestSet::let_go(std::chrono::milliseconds limit, const std::function<void(const Completed&)>& take) {
  const auto uses_others_memory = [](const Transfer* op) { return op->link != nullptr && !op->room; };
  for (size_t i = 0; i < requests_.size(); ++i) {
    const bool receives = operations_[i]->kind == Transfer::Kind::kReceive;
    if (receives && uses_others_memory(operations_[i])) MPI_Cancel(&requests_[i]);
  }
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + limit;
  while (std::any_of(operations_.begin(), operations_.end(), uses_others_memory)) {
    if (Clock::now() >= deadline) return false;
    try {
      for (const Completed& completed : test()) {
        completed.operation->done = true;
        if (completed.operation->link == nullptr) take(completed);
      }
    } catch (const Error&) {
      return false;
    }
    sched_yield();
  }
  return true;
}

bool RequestSet::abandon(std::chrono::milliseconds limit) noexcept {
  for (size_t i = 0; i < requests_.size(); ++i) {
    const Transfer::Kind kind = operations_[i]->kind;
    // Cancelling a receive is local: it needs no peer.
    if (kind == Transfer::Kind::kReceive || kind == Transfer::Kind::kNoticeReceive) MPI_Cancel(&requests_[i]);
  }
  using Clock = std::chrono::steady_clock;
  const auto none_left = [this] {
    return std::all_of(requests_.begin(), requests_.end(), [](MPI_Request r) { return r == MPI_REQUEST_NULL; });
  };
  for (const auto deadline = Clock::now() + limit; !none_left() && Clock::now() < deadline; sched_yield()) {
    int all = 0;
    MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &all, MPI_STATUSES_IGNORE);
  }
  bool clean = true;
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    clean = false;
    MPI_Request_free(&requests_[i]);
    if (operations_[i]->room) keep_forever(std::move(operations_[i]->room));
  }
  requests_.clear();
  operations_.clear();
  return clean;
}

}  // namespace dcoll::mpi
