import pytest, time
from tests.ops.attention import not_finite as nf
from tests.ops.attention.test_kernel import run
pytestmark = pytest.mark.usefixtures("launch")
@pytest.mark.parametrize("fmt,d,dv,rows,group",[
 ("fp16",24,40,16,1),("bf16",24,40,16,1),("fp16",64,0,128,1),("bf16",64,0,128,1),
 ("fp16",24,136,16,1),("bf16",24,40,16,7),("fp16",24,40,16,7),("fp32",24,40,16,1),
 ("fp16",264,0,16,1),("int8",32,32,16,1),("int8",32,32,128,1)])
def test_it(fmt,d,dv,rows,group):
    t=time.time()
    try: nf.check(run,fmt,d,dv,block_rows=rows,group=group)
    finally: print("TIME",fmt,d,dv,rows,group,round(time.time()-t,1))
