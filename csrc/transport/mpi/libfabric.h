// Open MPI's way over libfabric (its BTL "ofi"): where nothing can use it, it makes MPI's start a second longer.
#pragma once

namespace dcoll::mpi {

// Called before MPI_Init_thread. When it closes that BTL, Open MPI sleeps for a second, and it does so in every start
// on a machine without a network for it (opal/mca/btl/ofi/btl_ofi_component.c, mca_btl_ofi_component_close). There it
// is left out beforehand: OMPI_MCA_btl=^ofi, unless the user has said which BTLs to take, by a variable or in a file.
void leave_out_libfabric();

}  // namespace dcoll::mpi
