"""cuda.bindings: reserve, create, map, grow, unmap and map elsewhere."""

import numpy as np
from common import digest, says
from core_common import check, driver

check(driver.cuInit(0))
context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))
check(driver.cuCtxSetCurrent(context))
prop = driver.CUmemAllocationProp()
prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
prop.location.id = 0
flags = driver.CUmemAllocationGranularity_flags
unit = check(driver.cuMemGetAllocationGranularity(prop, flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
says("unit", unit)
base = check(driver.cuMemAddressReserve(16 * unit, 0, 0, 0))
access = driver.CUmemAccessDesc()
access.location = prop.location
access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
handles = []
for index in range(8):
    handle = check(driver.cuMemCreate(unit, prop, 0))
    check(driver.cuMemMap(int(base) + index * unit, unit, 0, handle, 0))
    check(driver.cuMemSetAccess(int(base) + index * unit, unit, [access], 1))
    handles.append(handle)
check(driver.cuMemsetD32(int(base), 0x01020304, 8 * unit // 4))
check(driver.cuMemsetD8(int(base) + 3 * unit - 5, 9, 10))
back = np.empty(8 * unit, np.uint8)
check(driver.cuMemcpyDtoH(back.ctypes.data, int(base), back.nbytes))
digest("filled", back)
check(driver.cuMemUnmap(int(base) + 2 * unit, unit))
check(driver.cuMemMap(int(base) + 12 * unit, unit, 0, handles[2], 0))
check(driver.cuMemSetAccess(int(base) + 12 * unit, unit, [access], 1))
check(driver.cuMemcpyDtoH(back.ctypes.data, int(base) + 12 * unit, unit))
digest("elsewhere", back[:unit])
error, *_ = driver.cuMemcpyDtoH(back.ctypes.data, int(base) + 2 * unit, 16)
says("unmapped", driver.CUresult(int(error)).name)
says("reused", driver.CUresult(int(driver.cuMemMap(int(base), unit, 0, handles[0], 0)[0])).name)
for index in (0, 1, 3, 4, 5, 6, 7, 12):
    check(driver.cuMemUnmap(int(base) + index * unit, unit))
for handle in handles:
    check(driver.cuMemRelease(handle))
check(driver.cuMemAddressFree(base, 16 * unit))
says("freed", "all")
