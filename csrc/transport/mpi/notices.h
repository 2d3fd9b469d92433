// What ranks tell each other beside the data: that one of them failed, that one waits in vain and for whom, and notes.
// On a communicator of its own, where receives from any source are always posted, so that a rank hears whatever it is
// doing. All of it is best effort: who cannot be told is gone, and will be missed elsewhere. Part of the plugin alone.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "transport/mpi/requests.h"

namespace dcoll::mpi {

class MpiNotices : public HeardNotices {
 public:
  // Collective over `parent`, which is duplicated. Requests are added to `requests` and come back through finish().
  MpiNotices(MPI_Comm parent, RequestSet& requests);

  void post_failure(const std::string& text);
  void post_stall(const std::vector<int>& waits_for);
  void post_note(int peer, const std::string& text);

  // A completed request of kind kNoticeSend or kNoticeReceive.
  void finish(const RequestSet::Completed& completed);
  // Receives always posted.
  static constexpr size_t kListening = kTopics;  // the topics are the tags
  // After everything outstanding was abandoned. Not clean: MPI may still use the memory, which stays then.
  void close(bool clean) noexcept;

 private:
  void listen(Topic topic);
  void tell_everybody(Topic topic, std::vector<std::byte> notice);
  struct Sent;
  Sent& keep(std::vector<std::byte> notice);
  void send(Sent& sent, int peer, Topic topic);

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  RequestSet& requests_;
  std::array<Transfer, kListening> receives_;               // by topic
  std::array<std::vector<std::byte>, kListening> inboxes_;  // their memory
  // A notice and the sends that read it. They live until all have completed, or until close(): a send to a rank that is
  // gone may never complete.
  struct Sent {
    std::vector<std::byte> notice;
    std::vector<Transfer> sends;
  };
  std::vector<std::unique_ptr<Sent>> sent_;
  bool failure_posted_ = false;
};

}  // namespace dcoll::mpi
