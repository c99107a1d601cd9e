// The families of instructions. To add a family, write a file with a Family, and list the family's
// name here.
#include "core.h"

#define FAMILY_LIST(X) \
  X(CONTROL) X(INTEGER) X(FLOAT) X(CONVERT) X(WARP) \
  X(BARRIER) X(MBARRIER) X(FENCE) X(ADDRESS) X(LAUNCH_CONTROL) \
  X(MEMORY) X(ATOMIC) X(CP_ASYNC) X(BULK_COPY) X(TENSOR_COPY) \
  X(TENSOR_MAP) X(ASYNC_STORE) X(MMA) X(WGMMA) X(TMEM) \
  X(TCGEN05_MMA) X(TCGEN05_COPY)

#define DECLARED(name) extern const Family FAMILY_##name;
#define LISTED(name) &FAMILY_##name,
FAMILY_LIST(DECLARED)
const Family *const FAMILIES[] = {FAMILY_LIST(LISTED) NULL};
