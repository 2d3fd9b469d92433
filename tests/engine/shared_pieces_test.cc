// Large messages that both ranks copy: who takes which piece, and two ranks' PointToPoint advanced by hand.
#include "engine/p2p/shared_pieces.h"

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "engine/p2p/point_to_point.h"
#include "support/check.h"
#include "support/refused.h"
#include "transport/mapped/local.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

constexpr size_t kPiece = size_t{1} << 20;
constexpr uint64_t kTag = point_key(PointSpace::kUser, 3);

// Both ends of a message in one process, each moved by its advance() alone.
struct Pair {
  explicit Pair(size_t count) : sent(count), received(count) {
    for (size_t i = 0; i < count; ++i) sent[i] = static_cast<std::byte>(i * 7 + (i >> 12) + 1);
    for (int rank = 0; rank < 2; ++rank) {
      const Endpoint& end = ends[static_cast<size_t>(rank)];
      points.push_back(std::make_unique<PointToPoint>(
          PointRanks{.transport = end.transport.get(),
                     .window = end.window,
                     .in_window = {0, 1},
                     .job_ranks = {0, 1},
                     .waiters = &waiters[rank]},
          [](const std::shared_ptr<Operation>& operation, const std::exception_ptr& error) {
            operation->error = error;
            operation->done = true;
          }));
    }
    send = submit(0, {.kind = Kind::kSend, .in = sent.data(), .count = count, .root = 1, .tag = kTag});
    receive = submit(1, {.kind = Kind::kReceive, .out = received.data(), .count = count, .root = 0, .tag = kTag});
  }
  std::shared_ptr<Operation> submit(int rank, Request request) {
    auto operation = std::make_shared<Operation>(std::move(request));
    points[static_cast<size_t>(rank)]->submit(operation);
    return operation;
  }
  bool advance(int rank) {
    bool moved = false;
    points[static_cast<size_t>(rank)]->advance(moved);
    return moved;
  }
  bool has(size_t piece) const {
    const size_t begin = piece * kPiece, bytes = std::min(kPiece, sent.size() - begin);
    return std::memcmp(received.data() + begin, sent.data() + begin, bytes) == 0;
  }

  std::vector<Endpoint> ends = connect_local(2, {.arena_bytes = 64 << 20, .slot_bytes = 32 << 10, .slots = 4});
  std::atomic<int> waiters[2] = {0, 0};
  std::vector<std::byte> sent, received;
  std::vector<std::unique_ptr<PointToPoint>> points;
  std::shared_ptr<Operation> send, receive;
};

}  // namespace

TEST(pieces_cover_messages_of_every_length) {
  for (const size_t bytes : {size_t{256} << 10, (size_t{256} << 10) + 1, kPiece, 2 * kPiece + 1, size_t{1} << 40}) {
    const size_t each = SharedPieces::piece_bytes(bytes), count = SharedPieces::count(bytes);
    CHECK(count >= 2 && count <= 0xffff);
    CHECK(each * count >= bytes && each * (count - 1) < bytes);
  }
}

TEST(every_piece_is_taken_once) {
  SharedPieces pieces;
  for (uint32_t message = 1; message < (kSanitized ? 200u : 2000u); ++message) {
    const size_t count = 1 + message % 50;
    std::vector<std::atomic<int>> taken(count);
    pieces.begin(message, count);
    std::thread sender([&] {
      while (const auto piece = pieces.take_last(message)) {
        ++taken[*piece];
        pieces.wrote();
      }
    });
    while (const auto piece = pieces.take_first()) ++taken[*piece];
    while (!pieces.settled()) std::this_thread::yield();
    for (const auto& times : taken) CHECK_EQ(times.load(), 1);
    CHECK(!pieces.given_back());
    sender.join();
  }
}

TEST(a_sender_that_is_late_takes_nothing_of_another_message) {
  SharedPieces pieces;
  pieces.begin(1, 4);
  pieces.begin(2, 4);
  CHECK(!pieces.take_last(1));
  CHECK_EQ(*pieces.take_last(2), size_t{3});
}

TEST(memory_is_the_receivers_once_what_was_taken_is_written) {
  SharedPieces pieces;
  pieces.begin(1, 5);
  CHECK_EQ(*pieces.take_last(1), size_t{4});
  pieces.close();
  CHECK(!pieces.take_last(1));
  CHECK(!pieces.settled());
  pieces.wrote();
  CHECK(pieces.settled() && !pieces.given_back());

  pieces.begin(2, 5);
  CHECK_EQ(*pieces.take_last(2), size_t{4});
  CHECK_EQ(pieces.message(), 2u);
  pieces.wrote();
  CHECK_EQ(*pieces.take_last(2), size_t{3});
  pieces.could_not_write();
  CHECK(!pieces.settled());  // three are left
  for (size_t piece = 0; piece < 3; ++piece) CHECK_EQ(*pieces.take_first(), piece);
  CHECK(pieces.settled());
  CHECK_EQ(*pieces.given_back(), size_t{3});
}

TEST(a_sender_that_waits_writes_from_the_end) {
  Pair pair(5 * kPiece + 17);
  pair.advance(1);  // hears of it, and reads the first piece
  if (!pair.has(0)) return lacks("ptrace", "the kernel lets nobody read here");
  CHECK(!pair.has(5));
  pair.advance(0);
  CHECK(!pair.has(5) && !pair.has(4));  // nobody waits there
  pair.waiters[0] = 1;
  pair.advance(0);
  CHECK(pair.has(5) && pair.has(4) && !pair.has(1));
  CHECK(!pair.send->done && !pair.receive->done);
  for (int look = 0; look < 20 && !pair.send->done; ++look) {
    pair.advance(1);
    pair.advance(0);
  }
  CHECK(pair.send->done && pair.receive->done && !pair.receive->error);
  CHECK(pair.received == pair.sent);
  CHECK(!pair.advance(0) && !pair.advance(1));
}

TEST(the_receiver_reads_all_of_it_where_nobody_writes) {
  Pair pair(3 * kPiece);
  for (int look = 0; look < 20 && !pair.receive->done; ++look) pair.advance(1);
  CHECK(pair.receive->done && pair.received == pair.sent);
  pair.waiters[0] = 1;
  pair.advance(0);
  CHECK(pair.send->done);
}

TEST(where_the_kernel_refuses_to_write_the_receiver_reads) {
  Pair pair(3 * kPiece + 5);
  pair.waiters[0] = 1;
  pair.advance(1);
  if (!pair.has(0)) return lacks("ptrace", "the kernel lets nobody read here");
  without(SYS_process_vm_writev, [&] {
    pair.advance(0);
    CHECK(!pair.has(3));
    for (int look = 0; look < 20 && !pair.send->done; ++look) pair.advance(look % 2);
  });
  CHECK(pair.send->done && !pair.receive->error && pair.received == pair.sent);
}

TEST(where_the_kernel_refuses_to_read_after_all_it_is_sent_in_slices) {
  Pair pair(5 * kPiece);
  pair.advance(1);
  if (!pair.has(0)) return lacks("ptrace", "the kernel lets nobody read here");
  pair.waiters[0] = 1;
  pair.advance(0);
  without(SYS_process_vm_readv, [&] {
    for (int look = 0; look < 10000 && !pair.receive->done; ++look) pair.advance(look % 2);
  });
  CHECK(pair.receive->done && !pair.receive->error && pair.received == pair.sent);
  pair.advance(0);
  CHECK(pair.send->done);
}

TEST(more_messages_than_there_are_words) {
  Pair pair(2 * kPiece);
  std::vector<std::shared_ptr<Operation>> all = {pair.send, pair.receive};
  std::vector<std::vector<std::byte>> received(40, std::vector<std::byte>(pair.sent.size()));
  pair.waiters[0] = 1;
  for (auto& to : received) {
    const size_t count = to.size();
    all.push_back(pair.submit(0, {.kind = Kind::kSend, .in = pair.sent.data(), .count = count, .root = 1, .tag = 1}));
    all.push_back(pair.submit(1, {.kind = Kind::kReceive, .out = to.data(), .count = count, .root = 0, .tag = 1}));
  }
  for (int look = 0; look < 1000 && !all.back()->done; ++look) {
    pair.advance(look % 2);
  }
  for (int look = 0; look < 100; ++look) pair.advance(look % 2);
  for (const auto& operation : all) CHECK(operation->done && !operation->error);
  for (const auto& to : received) CHECK(to == pair.sent);
}

TEST(what_the_sender_has_taken_is_waited_for) {
  SharedPieces pieces;
  pieces.begin(1, 5);
  CHECK(pieces.take_last(1).has_value());
  CHECK(!pieces.settle_by(Clock::now() + std::chrono::milliseconds(5)));
  std::atomic<bool> wrote = false;
  std::thread sender([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    wrote = true;
    pieces.wrote();
  });
  CHECK(pieces.settle_by(Clock::now() + std::chrono::seconds(30)));
  CHECK(wrote.load());
  sender.join();
}

// The receiver may sleep until it hears of it.
TEST(a_sender_that_waits_no_more_tells_what_it_wrote) {
  Pair pair(8 * kPiece);
  const auto told = [&] { return pair.ends[1].transport->front(0, kPointChannel) != nullptr; };
  pair.waiters[0] = 1;
  pair.advance(1);
  if (!pair.has(0)) return lacks("ptrace", "the kernel lets nobody read here");
  pair.advance(0);
  CHECK(pair.has(7) && !told());
  pair.waiters[0] = 0;
  pair.advance(0);
  CHECK(told());
  for (int look = 0; look < 20; ++look) pair.advance(1);
  CHECK(pair.receive->done && pair.received == pair.sent);
  pair.advance(0);
  CHECK(pair.send->done);
}

// As a failed communicator does, whose receiver wants its memory back.
TEST(after_a_failure_the_sender_takes_nothing) {
  Pair pair(4 * kPiece);
  pair.waiters[0] = 1;
  pair.advance(1);
  if (!pair.has(0)) return lacks("ptrace", "the kernel lets nobody read here");
  CHECK(pair.points[1]->let_go(std::chrono::milliseconds(0)));
  pair.advance(0);
  CHECK(!pair.has(3));  // it takes no more
  pair.points[1]->abandon(std::make_exception_ptr(std::runtime_error("given up")));
  CHECK(pair.receive->done && pair.receive->error);
}

// The word that both share, of the first message.
std::atomic<uint64_t>& word_of(Pair& pair, size_t pieces) {
  auto* const words = reinterpret_cast<uint64_t*>(pair.ends[1].window->base(1));
  for (size_t at = 0; at < (64 << 20) / sizeof *words; at += sizeof(SharedPieces) / sizeof *words) {
    const uint64_t* const word = words + at;
    if ((word[0] & 0xffff) == pieces && word[0] >> 32 != 0 && word[1] == 0 && word[2] == 0 && word[3] == pieces) {
      return *reinterpret_cast<std::atomic<uint64_t>*>(words + at);
    }
  }
  fail(__FILE__, __LINE__, "there is no such word");
}

// A stray write has changed it: neither copies what lies outside of the message, and each names the other.
TEST(words_that_are_damaged) {
  for (const int who : {0, 1}) {
    Pair pair(5 * kPiece);
    pair.waiters[0] = 1;
    pair.advance(1);
    if (!pair.has(0)) return lacks("ptrace", "the kernel lets nobody read here");
    std::atomic<uint64_t>& word = word_of(pair, 5);
    const uint64_t message = word.load() >> 32 << 32;
    word = message | uint64_t{1000} << 16 | 2000;
    CHECK_THROWS(pair.advance(who), TransportError,
                 "rank " + std::to_string(1 - who) + " took a piece behind the end of a message of " +
                     std::to_string(5 * kPiece) + " bytes");
    CHECK(!pair.has(4));
  }
}

TEST_MAIN
