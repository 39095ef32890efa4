import pytest, time
from tests.ops.attention import not_finite as nf
from tests.ops.attention.test_kernel import run
from tests.ptx.nvcc import needs_nvcc
pytestmark = [needs_nvcc, pytest.mark.usefixtures("launch")]
@pytest.mark.parametrize("fmt,d,dv,rows,group",[
 ("fp16",136,0,16,1),("bf16",136,0,16,1),("fp16",136,200,16,4),("bf16",520,0,16,1)])
def test_it(device_code,fmt,d,dv,rows,group):
    launcher=device_code()
    t=time.time()
    try: nf.check(lambda c: run(c,2),fmt,d,dv,block_rows=rows,group=group,names=nf.BRIEF)
    finally: print("TIME",fmt,d,dv,rows,group,round(time.time()-t,1), launcher.launches)
