// CUDA's runtime for tests, on the CPU (fake_cudart.cc): what csrc/device/cuda.cc looks up, under the names of the
// libraries in which it looks. Memory is the host's, and what is put into streams is done at once. What it keeps in
// mind is what a GPU would hold against its caller: contexts that nobody asked for, and captures that were broken.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fake_cudart {

inline constexpr int kDevices = 3;
inline constexpr int kGlobal = 0, kRelaxed = 2;  // cudaStreamCaptureMode

// The devices on which there is a context, and the call that made it: of a thread whose current device it was.
std::map<int, std::string> contexts();
// Whether a thread captures a graph in mode Global, as torch.cuda.graph() does. What is unsafe then breaks its capture,
// unless it is called in mode Relaxed; to wait for the whole device does in any mode.
void capture_elsewhere(bool captures);
// The calls that have broken a capture.
std::vector<std::string> broken();
// Of the calling thread.
int mode();
// From now on the stream is captured, or what is put into it is not done.
void capture(void* stream, bool captures);
void hold_up(void* stream, bool held);
// From now on a stream is captured that waits for the default stream, or none is. The default stream may then not be
// used, nor asked whether it is captured.
void capture_beside_default(bool captures);
// What cudaGetLastError() would tell the calling thread.
int last_error();
// From now on this call fails, as do those named before.
void fail(const std::string& call);
// Of memory that the driver has mapped: which devices were allowed to use it.
std::set<int> devices_of(const void* data);
// No contexts, no captures, no failures.
void reset();

// For fake_cuda.cc. What a call of the driver's gives, which needs no context.
inline constexpr size_t kGranularity = size_t{2} << 20;
int enter_driver(const char* call);
void note_access(const void* data, int device);

}  // namespace fake_cudart
