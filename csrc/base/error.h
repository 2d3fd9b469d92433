// One error regime: exceptions, rooted at Error. Each class is a Python class of the same name (dcoll.DcollError for
// Error), made in bind/errors.cc. A message says what was got, what is allowed and what to do.
#pragma once

#include <stdexcept>

namespace dcoll {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller passed something that can never work (bad root, average of bool). Nothing was sent; the job goes on.
class ArgumentError : public Error {
 public:
  using Error::Error;
};

// Ranks called different collectives. Found before any data moved; raised on every rank; the job can go on.
class MismatchError : public Error {
 public:
  using Error::Error;
};

// A collective that cannot go on without a rank that joined. As MismatchError: nothing was moved, the job can go on.
class JoinedError : public MismatchError {
 public:
  using MismatchError::MismatchError;
};

// A deadline passed; the message names the ranks waited for. The communicator has failed.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

// An operation that some ranks did not submit for DCOLL_STALL_SHUTDOWN_TIME: the same words on every rank.
class StallError : public TimeoutError {
 public:
  using TimeoutError::TimeoutError;
};

// A peer died, closed its communicator, or reported a failure. The communicator has failed.
class PeerError : public Error {
 public:
  using Error::Error;
};

// The medium failed (MPI error, mmap, socket), or a message broke the protocol. The communicator has failed.
class TransportError : public Error {
 public:
  using Error::Error;
};

}  // namespace dcoll
