// From "a process" to "a communicator of all ranks": who is on which node, who can map whose memory, who needs
// messages.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/settings.h"
#include "engine/communicator/communicator.h"
#include "transport/mpi.h"
#include "transport/store.h"

namespace dcoll {

// How long the start-up of MPI waits, and what it says meanwhile. look_around: see StartUp.
StartUp start_up_from_env(std::function<void()> look_around);

// All ranks of the job; collective. nullptr: this process alone.
std::shared_ptr<Communicator> connect_world(Bootstrap* job, const Settings& settings,
                                            std::function<void()> look_around = {});

// n communicators of one world inside this process, one for each of n threads. With DCOLL_TRANSPORT=mpi they have no
// memory in common but for messages, like ranks on different nodes: schedules run instead of the fused forms. With
// DCOLL_NODES they are on several nodes, with these links.
std::vector<std::shared_ptr<Communicator>> connect_threads(int n, const Settings& settings,
                                                           const LinkConstants& links = {});

}  // namespace dcoll
