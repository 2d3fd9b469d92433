// Trees: O(log n) latency. All-reduce runs two binary trees at once, each on half of the buffer, in which (almost)
// every rank is a leaf of one and an inner node of the other, so that both directions of every link are busy: P.
// Sanders, J. Speck, J. L. Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
// Computing 35(12), 2009, section 2; NCCL's graph/trees.cc is the well-known implementation.
//
// Nodes are numbered 1..n in order (left subtree, node, right subtree), which makes the tree a matter of bits:
//
//                     8                     the level of a node is its number of trailing zero bits:
//              /             \              odd nodes are leaves, even nodes inner nodes
//          4                    12
//        /    \               /    \        n = 12: nodes that would hang below a missing one (13, 14) do not exist;
//      2       6            10     (14)     the right child of a node is then the next smaller candidate, so below
//     / \     / \          /  \             n = 13, node 12 would have 13 as its right child
//    1   3   5   7        9   11
//
// Tree 0 gives node i to rank i-1: inner nodes are odd ranks. Tree 1 must make the even ranks inner nodes:
//    n even: mirrored, node i is rank n-i.          n odd: shifted, node i is rank i mod n.
// Rank 0 is a leaf in both trees when n is odd; nobody is an inner node of both.
//
// Every tree has an up lane (reduction, channel 2t) and a down lane (broadcast, channel 2t+1), which advance
// independently, so round t+1 climbs while round t descends. Where they meet, in the root's up lane, the sum turns
// around: what that lane sends goes out on the down lane's number.
#include <optional>

#include "plan/algorithms.h"
#include "plan/steps.h"

namespace dcoll::plan {
namespace {

using namespace steps;

struct Node {
  std::optional<uint32_t> parent, left, right;  // ranks
};

// Links of node i (1..n) in the in-order binary tree on n nodes, as node numbers.
Node in_order_links(uint32_t n, uint32_t i) {
  const uint32_t bit = i & (~i + 1);  // lowest set bit: 2^level
  Node node;
  // Up one level: of i-bit and i+bit the one with bit 2*bit set. If that node is missing, its left neighbour adopts i.
  const uint32_t up = (i ^ bit) | (bit << 1);
  if (up <= n) {
    node.parent = up;
  } else if (i != bit) {
    node.parent = i ^ bit;
  }
  if (bit > 1) {
    node.left = i - bit / 2;
    for (uint32_t half = bit / 2; half > 0; half /= 2) {
      if (i + half > n) continue;
      node.right = i + half;
      break;
    }
  }
  return node;
}

// Links of `rank` in tree 0 or 1, as ranks.
Node links(uint32_t n, uint32_t rank, uint32_t tree) {
  const bool mirror = n % 2 == 0;
  auto to_rank = [&](uint32_t node) { return tree == 0 ? node - 1 : mirror ? n - node : node % n; };
  const uint32_t self = tree == 0 ? rank + 1 : mirror ? n - rank : (rank == 0 ? n : rank);
  Node node = in_order_links(n, self);
  for (std::optional<uint32_t>* link : {&node.parent, &node.left, &node.right}) {
    if (*link) *link = to_rank(**link);
  }
  return node;
}

// Reduction towards the root: children's sums and our own share, in the order (own + left) + right.
void add_up_lane(Channel& lane, const Node& node, uint32_t chunk, uint32_t down_channel) {
  if (!node.parent) {
    // Root: complete the chunk and turn around, down the other lane.
    lane.send_on = static_cast<uint8_t>(down_channel);
    if (node.right) {
      lane.scratch = true;
      lane.steps.push_back(recv_reduce(scratch(chunk), in(chunk), *node.left));
      lane.steps.push_back(recv_reduce(out(chunk), scratch(chunk), *node.right, true));
      lane.steps.push_back(send(out(chunk), *node.left));
      lane.steps.push_back(send(out(chunk), *node.right));
    } else {
      lane.steps.push_back(recv_reduce(out(chunk), in(chunk), *node.left, true));
      lane.steps.push_back(send(out(chunk), *node.left));
    }
  } else if (!node.left) {
    lane.steps.push_back(send(in(chunk), *node.parent));
  } else if (!node.right) {
    lane.steps.push_back(recv_reduce_send(nowhere(chunk), in(chunk), *node.left, *node.parent));
  } else {
    lane.scratch = true;
    lane.steps.push_back(recv_reduce(scratch(chunk), in(chunk), *node.left));
    lane.steps.push_back(recv_reduce_send(nowhere(chunk), scratch(chunk), *node.right, *node.parent));
  }
}

// From the parent to us and on to the children. Nothing to do at the root, whose up lane has sent already.
void add_down_lane(Channel& lane, const Node& node, uint32_t chunk) {
  if (!node.parent) return;
  if (!node.left) {
    lane.steps.push_back(recv(out(chunk), *node.parent));
    return;
  }
  lane.steps.push_back(recv_send(out(chunk), *node.parent, *node.left));
  if (node.right) lane.steps.push_back(send(out(chunk), *node.right));
}

}  // namespace

Schedule tree_all_reduce(uint32_t n, uint32_t rank) {
  Schedule schedule = make_schedule(n, rank, 2, 2, 4);
  for (uint32_t tree = 0; tree < 2; ++tree) {
    Channel& up = schedule.channels[2 * tree];
    if (n == 1) {
      up.steps.push_back(copy(out(tree), in(tree), true));
      continue;
    }
    const Node node = links(n, rank, tree);
    add_up_lane(up, node, tree, 2 * tree + 1);
    add_down_lane(schedule.channels[2 * tree + 1], node, tree);
  }
  return schedule;
}

// One binary tree, numbered level by level from the root (children of v: 2v+1 and 2v+2), rotated so that v = 0 is
// `root`.
//
//              0           rounds follow each other down the tree: after floor(log2 n) hops every further slice
//          /       \       costs only what its slowest node needs to send it twice
//         1         2
//        / \       / \     .
//       3   4     5   6
Schedule tree_broadcast(uint32_t n, uint32_t rank, uint32_t root) {
  Schedule schedule = make_broadcast(n, rank, root);
  std::vector<Step>& steps = schedule.channels[0].steps;
  const uint32_t v = (rank + n - root) % n;
  auto to_rank = [&](uint32_t node) { return (node + root) % n; };
  std::optional<uint32_t> left, right;
  if (2 * v + 1 < n) left = to_rank(2 * v + 1);
  if (2 * v + 2 < n) right = to_rank(2 * v + 2);

  if (rank == root) {
    if (left) steps.push_back(send(in(0), *left));
    if (right) steps.push_back(send(in(0), *right));
    steps.push_back(copy(out(0), in(0)));
    return schedule;
  }
  const uint32_t parent = to_rank((v - 1) / 2);
  steps.push_back(left ? recv_send(out(0), parent, *left) : recv(out(0), parent));
  if (right) steps.push_back(send(out(0), *right));
  return schedule;
}

}  // namespace dcoll::plan
