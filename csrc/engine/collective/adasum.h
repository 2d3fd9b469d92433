// Adasum (Maleki, Musuvathi, Mytkowicz et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021): the
// sum of two gradients that does not overshoot where they point the same way,
//
//   Adasum(a, b) = (1 - a.b / (2 |a|^2)) a  +  (1 - a.b / (2 |b|^2)) b
//
// orthogonal ones are added, equal ones averaged. It is applied along a binary tree of the ranks, tensor by tensor:
// each has factors of its own, also where several travel in one buffer.
//
// The tree is recursive vector-halving, distance-doubling (the paper's AdasumRVH), for 8 ranks:
//
//   distance 1    01 23 45 67    partners share their piece: each takes one half, gives the other away
//   distance 2    0-2 1-3 4-6 5-7    ... of that half
//   distance 4    0-4 1-5 2-6 3-7
//
// After distance d the ranks of a group of 2d hold the combination of the group's gradients, each a piece of it. The
// dot products of two pieces are partial; they are added up over the group, which holds both vectors in full.
// Afterwards the halves travel back in reverse order. Every element of the result is computed by one rank and copied,
// so all ranks hold the same bits.
//
// A vector of zeros (a tensor this rank does not use) is neutral: the other one is taken as it is.
#pragma once

#include "engine/collective/fabric.h"
#include "engine/core/operation.h"
#include "engine/core/task.h"

namespace dcoll {

// Of an operation that is valid for this fabric's number of ranks.
Task move_by_adasum(Fabric& fabric, Operation& operation);

}  // namespace dcoll
