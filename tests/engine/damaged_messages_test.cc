// What ranks tell each other in messages, damaged by its sender's stray write: who reads it gets an error that names
// that rank, and nothing is done with words that cannot be.
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/collective/mismatch.h"
#include "engine/communicator/subset.h"
#include "engine/core/point.h"
#include "engine/p2p/point_message.h"
#include "faulty_transport.h"
#include "rank_threads.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

// What members of a group to be tell its lowest rank, and what that one answers.
TEST(words_of_those_who_make_a_group) {
  const uint64_t key = point_key(PointSpace::kGroups, 0);
  const auto on_both = [&](const std::function<void(Communicator&)>& culprit_does, int culprit) {
    const World world = connect_threads(2, test_settings());
    const std::string text = "rank " + std::to_string(culprit) + " sent, to make a group, what no rank sends";
    on_threads(2, [&](int rank) {
      if (rank == culprit) return culprit_does(*world[static_cast<size_t>(rank)]);
      CHECK_THROWS(make_group(world[static_cast<size_t>(rank)], {0, 1}, nullptr), TransportError, text);
    });
  };
  const std::vector<std::vector<uint64_t>> joinings = {{}, {0}, {0, 2}, {0, ~uint64_t{0}}};
  for (const std::vector<uint64_t>& joining : joinings) {  // the offset, and ranks that do not follow
    const size_t bytes = joining.size() * sizeof(uint64_t);
    on_both([&](Communicator& comm) { comm.wait(*comm.submit(message(Kind::kSend, joining.data(), bytes, 0, key))); },
            1);
  }
  const std::vector<std::vector<uint64_t>> answers = {{}, {0}, {0, 1}, {0, 1, 2, 3}, {7, 1, 2}};
  for (const std::vector<uint64_t>& answer : answers) {  // the outcome, and not two offsets
    on_both(
        [&](Communicator& comm) {
          std::vector<std::byte> joining(100);
          comm.wait(*comm.submit(message(Kind::kReceive, joining.data(), joining.size(), 1, key)));
          comm.wait(*comm.submit(message(Kind::kSend, answer.data(), answer.size() * sizeof(uint64_t), 1, key)));
        },
        0);
  }
}

// What a rank says that it called, where others have joined and take part in it.
TEST(calls_that_there_are_not) {
  const std::vector<std::function<void(Called&)>> damages = {
      [](Called& call) { call.count = uint64_t{1} << 62; },
      [](Called& call) { call.kind = static_cast<Kind>(200); },
      [](Called& call) { call.encoding.codec = static_cast<kernels::Codec>(99); },
      [](Called& call) { call.encoding = {.codec = kernels::Codec::kTopK, .ratio = -1}; },
  };
  for (const auto& damage : damages) {
    Fault fault;
    World world = faulty_world(fault, test_settings().on_nodes(false));
    fault.damage = [&](std::byte* data, size_t bytes) {
      if (bytes == sizeof(Called)) damage(*reinterpret_cast<Called*>(data));
    };
    on_threads(kRanks, [&](int rank) {
      Communicator& comm = *world[static_cast<size_t>(rank)];
      float values[4] = {};
      const std::string text = error_of([&] {
        run(comm, rank == kCulprit ? Request{.kind = Kind::kAllReduce, .in = values, .out = values, .count = 4}
                                   : Request{.kind = Kind::kJoin});
      });
      if (rank != kCulprit) CHECK(text.find("rank 1 sent a call that there is not") != std::string::npos);
    });
  }
}

// Selections of top-k, how many elements they are of, and their sums.
TEST(selections_that_no_encoder_makes) {
  constexpr size_t kCount = 300, kLongest = 4 + 30 * (2 + 4);  // ten of a hundred elements
  using By = std::function<void(std::byte*)>;
  const auto put = [](size_t at, auto value) -> By {
    return [=](std::byte* data) { std::memcpy(data + at, &value, sizeof value); };
  };
  const By elements = put(0, uint32_t{~0u}), more_elements = put(0, uint64_t{1} << 40);
  const By place = put(sizeof(uint32_t), uint16_t{kCount});
  // By owners: two lengths, two selections, a sum. The number of a message is among the culprit's own behind the
  // handshake, which is of eight bytes as well, but no small number.
  struct Damage {
    const char* codec;
    int message;
    By by;
  };
  const std::vector<Damage> damages = {
      {"topk 0.1 gather", 1, elements},      {"topk 0.1 gather", 1, place},    {"topk 0.1 owners", 1, more_elements},
      {"topk 0.1 owners", 2, more_elements}, {"topk 0.1 owners", 3, elements}, {"topk 0.1 owners", 3, place},
      {"topk 0.1 owners", 4, elements},      {"topk 0.1 owners", 5, elements}, {"topk 0.1 owners", 5, place},
  };
  for (const Damage& damage : damages) {
    Settings settings = test_settings().on_nodes(false);
    settings.compress_local = true;
    Fault fault;
    World world = faulty_world(fault, settings);
    int message = 0;
    fault.damage = [&](std::byte* data, size_t bytes) {
      uint64_t length = 0;
      if (bytes == sizeof length) std::memcpy(&length, data, sizeof length);
      const bool is_first = bytes == kLongest || (bytes == sizeof length && length < kCount);
      if ((message > 0 || is_first) && ++message == damage.message) damage.by(data);
    };
    on_threads(kRanks, [&](int rank) {
      Communicator& comm = *world[static_cast<size_t>(rank)];
      std::vector<float> x(kCount);
      for (size_t i = 0; i < kCount; ++i) x[i] = std::sin(static_cast<float>(i * 13 + 977 * comm.rank()));
      const std::string text = error_of([&] {
        run(comm, {.kind = Kind::kAllReduce,
                   .in = x.data(),
                   .out = x.data(),
                   .count = kCount,
                   .encoding = kernels::encoding_named(damage.codec)});
      });
      if (rank == kCulprit) return;
      CHECK(text.find("rank 1 sent a selection of the greatest elements that no encoder makes") != std::string::npos);
    });
  }
}

// Messages between two ranks: their heads, and what follows of a large one, which is told where it lies.
TEST(messages_that_make_no_sense) {
  using What = PointMessage::What;
  constexpr uint64_t kKey = point_key(PointSpace::kUser, 5);
  const auto offset_of = [](uint64_t offset) {
    return [offset](PointMessage& head) {
      auto* const follows = reinterpret_cast<std::byte*>(&head) + sizeof head;
      PointOffer offer;
      std::memcpy(&offer, follows, sizeof offer);
      CHECK(offer.offset != kUnmappedOffset);
      offer.offset = offset;
      std::memcpy(follows, &offer, sizeof offer);
    };
  };
  const auto pieces_at = [](uint64_t offset) {
    return [offset](PointMessage& head) {
      if (head.what == What::kShare) {
        std::memcpy(reinterpret_cast<std::byte*>(&head) + sizeof head + offsetof(PointShare, pieces), &offset,
                    sizeof offset);
      }
    };
  };
  struct Damage {
    size_t bytes;
    std::function<void(PointMessage&)> by;
    const char* text;
    Kind culprits = Kind::kSend;
  };
  const std::vector<Damage> damages = {
      {8, [](PointMessage& head) { head.what = static_cast<What>(99); }, "of no known kind"},
      {8, [](PointMessage& head) { head.bytes = (uint64_t{1} << 60); }, "its length is not what it says"},
      {8, [](PointMessage& head) { head.what = What::kOffer; }, "an offer of another length"},
      {8, [](PointMessage& head) { head.what = What::kTooLong, head.id = 3; }, "to what this rank has not sent"},
      {8, [](PointMessage& head) { head.what = What::kLeaves, head.id = 3; }, "to what this rank has not sent"},
      {8, [](PointMessage& head) { head.what = What::kDone; }, "an answer to what this rank has not sent"},
      {1 << 20, offset_of((uint64_t{1} << 60)), "what it offers lies outside its arena"},
      {1 << 20, offset_of((16 << 20) - 64), "what it offers lies outside its arena"},
      {1 << 20, offset_of(kUnmappedOffset - 100), "what it offers lies outside its arena"},
      {1 << 20, pieces_at(uint64_t{1} << 60), "what it shares lies outside its arena", Kind::kReceive},
      {1 << 20, pieces_at((16 << 20) - 8), "what it shares lies outside its arena", Kind::kReceive},
      {1 << 20, pieces_at(4), "what it shares lies outside its arena", Kind::kReceive},
  };
  for (const Damage& damage : damages) {
    Fault fault;
    World world = faulty_world(fault, test_settings(), /*share_memory=*/true);
    fault.damage = [&](std::byte* data, size_t bytes) {
      auto* head = reinterpret_cast<PointMessage*>(data);
      if (bytes >= sizeof *head && head->key == kKey) damage.by(*head);
    };
    const std::shared_ptr<Memory> memory = world[damage.culprits == Kind::kSend ? 1 : 0]->alloc(damage.bytes);
    std::vector<std::byte> received(damage.bytes);
    on_threads(2, [&](int rank) {
      Communicator& comm = *world[static_cast<size_t>(rank)];
      const bool sends = (rank == kCulprit) == (damage.culprits == Kind::kSend);
      const std::string text = error_of([&] {
        comm.wait(*comm.submit(message(sends ? Kind::kSend : Kind::kReceive, sends ? memory->data() : received.data(),
                                       damage.bytes, 1 - rank, kKey)));
      });
      const std::string expected = "rank 1 sent a message that makes no sense (";
      if (rank != kCulprit)
        CHECK(text.find(expected) != std::string::npos && text.find(damage.text) != std::string::npos);
    });
  }
}

// Of what a rank noted of those it waits for, only what can be ranks is told.
TEST(ranks_that_a_rank_waits_for) {
  Fault fault;
  fault.notes = {{.rank = 2, .waits_for = {-7, 1 << 30, 0}, .heard = Clock::now() + std::chrono::hours(1)}};
  Settings settings = test_settings().on_nodes(false);
  settings.timeout_s = 0.3;
  World world = faulty_world(fault, settings);
  CHECK_THROWS(run(*world[kCulprit], {.kind = Kind::kBarrier}), TimeoutError, "waiting for rank 0 of 3. ");
}

TEST_MAIN
