// What ranks tell each other while a job begins (transport/meeting.h), over MPI or a store that others can write to.
// Whatever letters come, the meeting ends: with what each rank said, or with an error.
#include "transport/meeting.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "fuzz.h"

namespace {

using dcoll::Mailbox;
using dcoll::Meeting;
using Bytes = std::vector<std::byte>;

const std::vector<int> kRanks{0, 1, 2};

dcoll::StartUp quickly() {
  dcoll::StartUp start;
  start.timeout_s = 0.002;
  start.version = "1";
  return start;
}

// What a rank is given to read, all at once, and the first that it sends.
struct Letters final : Mailbox {
  Letters(std::vector<Letter> given, Bytes* first) : letters(std::move(given)), first_sent(first) {}
  void send(int, Bytes bytes) override {
    if (first_sent != nullptr && first_sent->empty()) *first_sent = std::move(bytes);
  }
  std::vector<Letter> take(const std::vector<int>&) override { return std::exchange(letters, {}); }
  std::vector<Letter> letters;
  Bytes* const first_sent;
};

void meet(int rank, std::vector<Mailbox::Letter> letters, Bytes* first_sent = nullptr) {
  Meeting meeting(std::make_unique<Letters>(std::move(letters), first_sent), rank, [] { return std::vector<int>(); });
  try {
    meeting.meet(quickly(), kRanks);
    FUZZ_CHECK(meeting.all_gather(quickly(), &rank, sizeof rank).size() == kRanks.size() * sizeof rank);
    meeting.leave("enough");
  } catch (const dcoll::Error&) {
  }
}

// "I am here", from which letters differ in what the input says: so most of them belong to this meeting.
const Bytes& here() {
  static const Bytes letter = [] {
    Bytes first;
    meet(1, {}, &first);
    return first;
  }();
  return letter;
}

}  // namespace

// The rank that reads; then of each letter who sent it, by how much it is longer than "I am here" (from 200 on: that it
// is shorter), and how many bytes of it, from its end, are changed by those that follow.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const uint8_t* const end = data + size;
  const int rank = *data++ % 3;
  std::vector<Mailbox::Letter> letters;
  while (end - data >= 3) {
    const int from = *data % 4;
    const size_t length = data[1] < 200 ? here().size() + data[1] : data[1] - 200u;
    const size_t changed = std::min({static_cast<size_t>(data[2]), static_cast<size_t>(end - data - 3), length});
    data += 3;
    Bytes bytes = here();
    bytes.resize(length);
    for (size_t i = 0; i < changed; ++i) bytes[length - 1 - i] ^= static_cast<std::byte>(*data++);
    letters.push_back({from, std::move(bytes)});
  }
  meet(rank, std::move(letters));
  return 0;
}
