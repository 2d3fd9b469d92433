// libdcoll_ucx.so: everything of dcoll that needs UCX. Loaded by ucx_loader.cc; see ucx.h.
#include <cstdlib>

#include "base/error.h"
#include "transport/ucx.h"
#include "transport/ucx/transport.h"

namespace dcoll::ucx_plugin {

void check_ucx(ucs_status_t status, const std::string& what) {
  if (status != UCS_OK) throw TransportError(what + " failed: UCX: " + ucs_status_string(status));
}

namespace {

class Library final : public Ucx {
 public:
  Library() {
    ucp_config_t* config = nullptr;
    check_ucx(ucp_config_read(nullptr, nullptr, &config), "reading UCX's configuration");
    // Ranks of one node have dcoll's own shared memory. UCX's would be used between what only looks like one node.
    if (std::getenv("UCX_TLS") == nullptr) ucp_config_modify(config, "TLS", "^sm");
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME;
    params.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
    params.mt_workers_shared = 1;  // a worker for each communicator, under locks of their own
    params.name = "dcoll";
    const ucs_status_t status = ucp_init(&params, config, &context_);
    ucp_config_release(config);
    check_ucx(status, "ucp_init");
  }

  std::string library_version() const override { return std::string("UCX ") + ucp_get_version_string(); }
  std::unique_ptr<Transport> make_transport(Bootstrap& job, size_t max_message_bytes, int slots,
                                            const std::string& tcp_congestion) override {
    return make_ucx_transport(context_, job, max_message_bytes, slots, tcp_congestion);
  }

 private:
  ucp_context_h context_ = nullptr;
};

}  // namespace

}  // namespace dcoll::ucx_plugin

extern "C" __attribute__((visibility("default"))) dcoll::Ucx* dcoll_ucx_v1() { return new dcoll::ucx_plugin::Library; }
