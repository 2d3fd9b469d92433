// What the files of the plugin (libdcoll_ucx.so) share with each other, and with nobody else.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>

#include "transport/bootstrap.h"

namespace dcoll::ucx_plugin {

// Throws TransportError("<what> failed: <UCX's own words>") unless status is UCS_OK.
void check_ucx(ucs_status_t status, const std::string& what);

// Collective over the job's ranks.
std::unique_ptr<Transport> make_ucx_transport(ucp_context_h context, Bootstrap& job, size_t max_message_bytes,
                                              int slots, const std::string& tcp_congestion);

}  // namespace dcoll::ucx_plugin
