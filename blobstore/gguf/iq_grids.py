"""The grids of the IQ types of GGUF: the points that their codes select.

The numbers are those of ``ggml-common.h`` of ggml, whose licence is in ``LICENSE.ggml``.
"""

from __future__ import annotations

import base64
import math
from functools import cache
from typing import Any, Final

import numpy as np

_GRIDS: Final = {
    "IQ2_XXS": ((256, 8), (8, 25, 43)),
    "IQ2_XS": ((512, 8), (8, 25, 43)),
    "IQ2_S": ((1024, 8), (8, 25, 43)),
    "IQ3_XXS": ((256, 4), (4, 12, 20, 28, 36, 44, 52, 62)),
    "IQ3_S": ((512, 4), (1, 3, 5, 7, 9, 11, 13, 15)),
    "IQ1_S": ((2048, 8), (-1, 0, 1)),
}
"""Shapes, and the values that a coordinate may have, in the order of the data."""


@cache
def grid(type_name: str) -> np.ndarray[Any, Any]:
    """Return the points of a type as float32 ``[points, weights of a point]``."""
    packed, at = np.frombuffer(base64.b85decode(_DATA), np.uint8), 0
    for name, (shape, values) in _GRIDS.items():
        bits = (len(values) - 1).bit_length()
        end = at + math.prod(shape) * bits // 8
        if name == type_name:
            digits = np.unpackbits(packed[at:end]).reshape(-1, bits)
            numbers = digits @ (1 << np.arange(bits)[::-1])
            return np.array(values, np.float32)[numbers].reshape(shape)
        at = end
    raise KeyError(type_name)


_DATA: Final = (
    b"004jhPyiqRpa4Vw6aWYShyW-6r~p9#5dZ}MB>+hP82|zRf&iibiU2@B5I_V#R6qeh5<n(E0Dypih=78CKoAfR1Q1"
    b"9N7!Uyvfe;}O2@paM5)cLu8V~?bfKVV%2vCtwX;1=CMo?go1dsuc5|A2@03c8xARrVVC?G)~5g-L1g&-mz5MTjdf"
    b"S?qhKm-s31O!L~0R#yI5(EYWRs;Y<AVdg61w^Gp0z?>uQG@^#AQT7`SQKFt0u&@viBtfTl$1au5F`X70VF~s0Ax^"
    b"P3S>p300@8xpa>BNNeBW6f(U3xAxHp-fQUdC5Euj)0T`7S09Zj-8CV9GASehZ7AO&@KmiZ|1OX%gNC6lD0RbTal>"
    b"rF>LIDy11_1y;2ti3f0zpziK!F5-A%T^FDS-eHAQ1==0ug2rgi#n#0Fgi;5FrF10U=Q#0AVFzNnwIvQK1H*00kfg"
    b"L<M982n7NKA_WjdfkhfcMui3yh83VyK$R7h03}2vWF;9T0c9Yi5D5ec0SPGy07+FzB#8-$02xpj1X+Yx5?O&M00M"
    b"vlpaMYxf&vgiBtii~M1nvP5E29uR1yIa2@(KOkx~{?V3Gln36g*!5Mo545C#MW7zP0bN(Pih0!C4W02YWA5f(*OL"
    b"M8}ifC>c)QVL*70E#3U1u76~004jhPyiqRpa4Vw6abU}WB>>NhyYjsC;&kK5de_@VE_dHg#c9mB>+hP82|zRf&fw"
    b"gA^=7J764`d3IISr5I~SXU_b;wgg{h4BtWD<NI)1s0YHI3Q9vO;ML-om2|y`8LO>Eg20#FSfPhedAb>=G6o3eTL4"
    b"Xl}1%Oq60)V1`KoAfRkPu)H1Q3J}R1hQ(NDvqh0T6)@Q4k>zMGzGbl@JLKLJ$%V1`q&HfKX6SAW%e56i^6IK~ND;"
    b"1yD&)0#HDZ5Re3rn2-UGfshiA03d)MP#_>6pddsb6d(v7SRg?l5g-L1B_IMI3LvT=KwuDH1YiMRLSSNG0H6q<D4>"
    b"?03ZOs)5Co6}U<3pNgalLsBm_tV7z6<Xfdo+mAp}JP6$A+csRTj<5(EYW07QU9P(&a^L_`!s2t+|d5kv(<0z?)>m"
    b"P9~=5QLC~1cU*E34{O?fD}*^AQVIt6ch*)K@<@bVH5=v859B(KvWP^1XKZ30F)GzVU$255F`X7gd_nZ6(o`*0Ax^"
    b"PnPf$zYNP-NfCx|sAPArcL<kfJ2naz45eNkc0tgBSKu8cs1V{l$AxK$B0Emc)0*ESzKo}4h1Q=)-0T=*SL0E-YW>"
    b"`R&q?nqR04N|RpeP6^RVX4TiYO^)252Ct2&jUnBB-LMKmiZ|kO5!;1ObErQ~@LbNC6lD0Re#lQ2`+Vp#en!6#)qW"
    b"Sph-;5&;GQ06~C3P(dI;L_rim2th$X5kUn(0zpziia|hu5P<}Ngn?**0f7J!fDup;AQ40n6cJ<*2oXUM5fKFu0ud"
    b"GwKv57;1W_1K0a2z=0Fj`P5s?LvKp_wz1R((-Q6Uu}i6H=CL}3wO1z~An5TO7CfCW$mAO%DP6a@$cC<Q?U5d{SW0"
    b"tG-t5Jdz<R7C+rfkgm?5rwLSKot-b1QkdX0Tl@qLKR9C097DW0#zbaNR=s-N|gX56eU3=1tn%Bq-6nRfn`#qKnV~"
    b"D1PK8N6$yz6k_l=F07)2$p^1ix02!1S1X%%DQCS*UKq;vySZR={6{(4-00MvlPy!$VL;@572m+`AK>`s11p)#Bf&"
    b"wZ6sscbl5JHeb1VRBqMM7ml0D=gD0)m2q3W6$vKoSrV1QLW2R1yIa2@+xw08$ZBT2dsEsgeL9AR<^Ir6K|%f+8v+"
    b"kYb3U0-_?KmZB=6Kn4&71O@>Hl?D<907i&L8Ag?cVuk<~P!<su1r{Y1XjTSRhE_qAMJAdiVP;gO38nxFfC?ZApb7"
    b"{Is0s=SMM`B#no0nQfQlfBsEPuL3W@<5RvKBFCYqos2r7swC@KmnDk>0a5^9oaD5|KcMyjf+004jhPyiqRpa4Vw6"
    b"abU}WB>>NhyYjsC;&kK5de_@VE_dHg#c9mB>+hP83368X#fHMf&fwgA^=7J761wWS^%m5KtK>ckU(HS1VDs9R6ry"
    b"^NI)1s0YHI3Q9vO;ML-oml|W@c2|!suDL_I%5<mt(hCo(8N<bPw0DypiP=FwSM1T~42!N=7L4Xl}k$_=<1%Oq60)"
    b"SG0qJS2Fihw{65D<_MU=Rclgb-8^BoIgt7!a5cXb=Gqfe=v;ArPSuMGzGbl@MhR2@r`8Sr9@H5)hIQVh{!pRuCo-"
    b"N)Q?l08oHXP*5OHpio3m6i}2<WKalDSWqZXK~ND;kx*e!1yF@hRZt~RNl+P30#JfbQcxmLMo<<|3Q$0h5Rj0NV2}"
    b"imRFDCXQIH{!MUWMc36MgN5|9Rv03d)MP#_>6L?9F(lptgv2q0J>s31Wg5g?HuVITz{g&<WRB_K&486W~6QXm!}s"
    b"vtmM5MTsggkV%)Bw$Ej0bo&JAz(#d6<`TqLSP190H8#m6rhNpD4?jI1)yf2Km-s3kOW`^1O$WxR0JdhNCX%Jm;?a"
    b"?fdo+mAp}JP6$F(8WdsQXi3C{$DFi|U5(JV21_V|FCIm_Z8Uz4DfJ9J4AVi=<L_`!sltg4i2t<fPSVSm9K|~Qmkw"
    b"jrc1w@5JRYWC3Nkkb$0z`sDQbZy|Mno1wK!gy4V1xvORD?)`7=!_YQG`W=6@)^B5`+eX02F`}P!u2(L=+ShloVtX"
    b"2ozWpC=@{y5fqUWVH5=vg%nj3B@{^%859B(f)r8|A{0gx78D8;KvWP^kW^q)1XP4nR8%BXNK_b90aSrhQB)yRMN}"
    b"132~<K<5>y6M0F+RaAe2Ou6qE>*L6i}c1(X7ms+2$^5G0T!U?c=2R3s!MNF)Iyfh18RAtXg46(k8HLL?F-0Azq<P"
    b"-GxvL}V0X2xLKI5o85qX=I9I5Tpd80i>0r00@8xPzWFhL<kfJln7)92nbjRs0cv_5eNkcg$Pv$83+Ohq6iiUst7<"
    b"x5J&__gh*6KNJs%lfk;tEMMxD$2}nXn5=aI}0EnQ7h=?eNsE84W1&AVuqKGPpKo}4hkQiVX1Q=8pBp65-7#IN<ff"
    b"!L3As9s%6&MK^LKqSl1{eTXP*@;XL|7D92v|W_5m*ISnOFi?K$sAi1egJsWtadcP$)zw6evL`5hw*HqA02;KxhzX"
    b"1ZY-hps0wb8K@$tqNqRt5CM<@U;zXHgaK3mBmtxWNC6lDm;nI+fdNqgApxNQMFAB7l>ub|2?2=#Sph-;5&;GQRsk"
    b"jfN&y-H06~C3P(dI;L_rimltE-c2tkNJSV2KS5kZkbVL=5!g+Wz8B|%9+89@R;f<aP2B0)w$7C{O@K!Ff}1c8KsR"
    b"DmRc7=ZzSQGp?WMS&H834ua^5`h2_fDup;AQ7MuL=hAblo4bR2oZ=8SP>`@K@kxVkr81L1rdc2RS_i-Nf8+l0uh1"
    b"{QV}8%MiCYf3K2k25K)j(U{M57gi%ycBvD9F7*PRHfl*OWAyGw96;TOMsZl~v5>W<G0Fi)^P>~>!M3EGc2$4aN5s"
    b"?Lv0+CvgKp_wzU?Bt{gdtQRBq2y47$E^6fgw>LAt6N}6(I>B5+Md50AYY(P+=fpL}3(R2w_2C5n%;k0%4Y6K%o$!"
    b"1fc<;00n>rPz4|bL<JNDlm%o32nC1*SOq8rK?M;7kp*D|1qFo#RRtvlNd*}N0tJEvQUxLfMg<lHKt&KmkVRlc1Vw"
    b"~JR7E63NJSV$0Y!mDQAHs|MMV`w2}MFh5=90@0EJM6AcaJQ6om+dL4^^81%+va0);>o5EYOWU=;)vgcVd3Bo#;%7"
    b"!?5(ffZ2|Ar(ax6%`2;LKPAf1{DBRfK^acAXP+F6jcaSK~)h|1yur7K$Q@c1eKVT0hItHfF)2RASFa46eS2HK_w9"
    b"-1tp~=0wq9Y5M=~q0c8NCWTjH2Dy2XP5DAb81PO!*R0$*rNC_AT0SQqFAqhnZ6$uFm5(x$g07-yJP)Q(3L`f7$2u"
    b"VRn5lIC}0!d~`5Qzkd0g07~N{Ij&P#GW@L>Uwr2pK^c5g7#;0vSMA5LpCS0a>A0DOrYD0GSq<Kq(L@1Swf5CMf`E"
    b"sA++zN~r(>fC5kgAOb`J6ar)d2m)9FK>`s11p<WvRRSdfNdf`_QUXQ-76L#*5JF%=1VV&DR6-;|NJ1Dw0YZU7Q9>"
    b"a?MM4!qLP8Qk2105=0D@40pn^n#6oNs55rPGRKoSrVkP=`L1QLW2R1zc-ND=`Off7*?AreIr6%q*&LJ|@Z1`+^Lf"
    b"KpIWAW}q96jBIMK~fP?1yTZ1qEbMT5RwFvXp#Yv03uK#L?RR-K_U?%1tN+fKw=PL0b*HVh@vH;rJ{nOilRUU5C&i"
    b"d1O|i#R0bpl7zP0bfd)|qAqGVT6$S|gLIx5B1_l5|P)0;X6h=Wt5k>_@rA9!85QYSX0fw4}02Y82P!=E-L>3el2o"
    b"^yW5f%j&0v47QKvob|1Xcl7CRR#T0G5%K8J0jM5GDjBm?i-xY9;_?VP=J92BrWCPzs<56bgt6s0u*}5efwgiVCU<"
    b"0ZLg)fQq1sh>9qRsEUG$B8sAlDvCfF5E=v;0UBZ&8X5pvWLia<peiUTiYgUql4>BTpsEO}h^i>6BC4vY00aPl0zh"
    b"OAKnMhYECm333&0?T2n2*kD2j*-gvc<7NF0C=K?o2f0FX%n&}|OTH4jj|0vO?dSVfAM9fn};2_W_d;JyMV;)Li{i"
    b"tw8Nc!!L5bAz}b76AklK`0i13>3kP9|05)2|$ub2$YE-77+y$Q7I77T@V>TkeMx=8QGE{q7h*Vn5oi}>7x|66OaN"
    b"xB0^*!f=DcaEF}UUrV5~-N<^ZH45y0tp~?Xy5+yED2_%y3AriGB8U?6Y9jV%`Ct_l*sxqnSBc?jXt2!VsLqsxzXf"
    b"Z>$HNyb33kb5yki82bHWLLplT|g-CAQlRKO<f+E5fv^wzzZ8H?wcCyMRtatWLyqPeh!+l<h$j8BLVo%N&A3WSUB>"
    b"a>4AQz<fu*{6td)98e9w+>Nx@RZUgZLDyXdR;B7y<wDZ!7g)Vh*oKg82AE=wIPO-NVBXE?CZgqTZ)QF#<_DmD2Ly"
    b"D-RD6#R^jEQUR{{E8ZSkKfb0-4yFN*N@00IC&3IN~$KqLe}gbY9k0)VInzz_uhunzz<2S6AFfIJDn`~V0bgb09uN"
    b"F<6#2!@F0g2=3i2sn#~T!0WE3J~D{P-P5IDGHDc2+&ar5b*<0bpg<Q1{fuZSP6ufEr!_5i5L}ySowq4y?`KQ4qz$"
    b">piTiGasyx<1So=ls7j2eZi6VYk0{!Q=)(eVX9Dn71MmZcID>$=ON_X0fq0jI0U#6sfDl0>7D1#QK?oFqEEvJe89"
    b"~$&fm{#?AeIThkV%A+i42y>Fp)`Ak;&YU5k(qN<q(mH6wwhE5w#JKT@o3Ao*4y}St*{G4Vc+6m6;uuA)*vvh7#d!"
    b"6(Q0QVU`jp29{|mkm*j7X$u&!>lrcA5;<d#c}J4Duah}jk@)~30$?fv;2=UoC_=;{f@m&+3?#xZCjzh`LR2q;94E"
    b"rOAPPXBN@T7|NUDk~sLD{IN+Bo`;Ubc0Akyt45_K<9Jt@)wq#B{3T1lvyEvDL0p<3CZBH|#TY9!*WBO+ca;)0@TO"
    b"0Mb>r)nOcGD9vhD=Tt4Dmo{ux(}y17o-CuHbbO7Lr5~iY&yeGIRo%BLwGa8AhrvjxJxLuix9DkT)oQyG*byQ(~U7"
    b"xA+TG8vYTnXn+>xYalae2x7%VeW5zV2E;VBsIin)5Yeu@OPPr@Ax9i6<Gb6S;3$(khumpfaL<mTP=tRUYK|~xx4B"
    b")~{WW<aN%FJ-XOtiujVL()+LX>Sm6!k@v9Y`D{##{-+oGr@S0z@Q=PUI3p<f6_jD#fg4Nc0;(e5b(tbHjW<P(_4P"
    b"g%DW<@Kr_FS;ZjM4WQIbDAdhd&=n<Cl?`0gbyOYU&|T@-9W~pXebOa@P^C^?B}Uw>HrH)aR6T>#y(DHvq+-TwVTJ"
    b"(Uj_B!*MQGMhYgSod)&b~VDd8TfXC_);E@J5J8tOI^Vt!}f2Y`MD2y}<caR-!jhd}aAi1!b$@)v<{SH*Id4RcpP^"
    b"xv)bUm|)ZW^kt#bgxqMH!pBM004jhPyiqRpa4VwQ~(G7hyW-6r~pv_MF155l>k`)0sw*lA^@TQRsaeBiU2AAssIo"
    b"`P(VaL6hM?fWI&`qSU^EQkw9TUg+Nt6r9eqQ89<ppDL_&{MnD!omOxrS0DypiAb_BNRDcM8h=3@7sDM#`MSx|18G"
    b"vbk0)T>mB7mZRMu1j;W`GKSihwGBs(?fg6cCgUSP(%FVGvair4ShqSrA4LW)NBsKu{1+P*9LiR8S;Pq)=#30Z>s;"
    b"p-=@-MNkz`RZx{sWl#xFiBMTkDNw0ULQqCfR!}BTrcg>y8c<qLnow#`6p&<)L68xU1(1c1Rgfi+36M#UnUHCaQjk"
    b"WF7LaC;03d)MARwS1R3Hc-h#)8+s31`wMIe<RSs(%+f*>Lwq99fv3LuIgDj=#LP+&x06kudv7+_dnL0|=7MPOB6N"
    b"njaZX<$ZR7GRcOW?))i0HA=NAfTY2RG<i;h@dE-sGw1xMWAJ%NuXJv0-%DRQlKKBqM%lw3ZROhDxj*M1O!9`6a-`"
    b"h7z9`ZK?D&51q4+DB?L(X83b7bX#_?D76g_AN(5R2KtvEkkVIfa1Vn^HR7501NJJP!Xhcy&p+p5lMMQ-}6+~4;l|"
    b"*Gk2}D^$5=4eXRzylf8bm~d6oiz7ScCzDk%VD{g@jdvC4{Af8HAaHQiMi?7KE0BT7*CpkQ87P6ckhxBot&6NEDb9"
    b"K@?FGkrW{mp%g_F6%<tzl@w(Zi4<8BDHIYEViX1x78F(#CKP5ArW8sP8WdU-Y7~G}P*k8)L{t=1R8*8yWK;-Lh*V"
    b"fqC{(CaK~xb`QB;vsMO1}U6;xGJl~iR^rBq2&8B|$RnN(?10#t%j5>!%DB2=PO22@5=7F1SLmQ-d`rc?@4id0%uK"
    b"$H-aP?V6ARFssIB$T9-NR*hA0hEE15tLDsA(Ww%MU+*Pm6RovWt2&j8I)O+DU@lHsg#nGqLhY|R+Ji)YLrAIlq6U"
    b"rK_n3*ktAUx1te7@B_yRJ2_#7*86=q`X(Uo4MkE#_S|kKygk)4?q-02BSY&}@5oA$hA!J2l6=YRpm1JdPrDO?YS!"
    b"AhXVq`{ShGbS`CS*!vnq+EZV5F3!7^Ik_5u}l%VWb75g``!aC8SBDnWSl?Qlv(tmZYYn00@8xAPArcR0s$NhzM8+"
    b"C<v$sQ3yo{We7<KSqK6Mf(RlAq6k(93J8h_S_mo#st8a>L`W1!WJp*@fk+WZVMtX-B}k=6Nk|z;SxA{kQb-0!mPl"
    b"quT1Y^MAc&xdM2J*~2#AP?D2S+tQHVu|m561CS%^Z2B8Z}hMu=933W$n`Du}9xP#6>#lo(_fSQrr)Q5caJVHkxNR"
    b"Tw20r5KqQQW!=U78qt2N*G!gU|3XGNLXlC0a#I3Ay`FN6<AeRWmt(=Sy(ApVps-P7FbqTCRnCeN?00LnpkRBP?!X"
    b"mgqUQQSeQYWVVG5z37AQkX_yk2l9&dVrkDUIfG8j+peR%*2q=gsC@82XQ7A<y6)0IK0w{tgA}FFL3Mh&wDk!QbU}"
    b"!{W6li2<SZI-GVQ7VDRcJ|Q8EBbkX=qYt256ROW@s8{T4(^MfT$p-pr{C_h^Q#2sHjn>MW~giWvE%G0;qzhBB-LM"
    b"R;UW7il{26s;E!_L;;imSOH-Hg#lFoB>|-YNdXxFnE@67W&uh8ngIYoKtT{ekU?NUgh5n6ltCmxq(MkQm_cYkQ9&"
    b"U=p+QAK6+u-&l|f}er9oLiDM6`0LO~Kil0gPRhCx<A3PDOiia}6;M1d56lz~`*L4k#VRe_~}8G&hmVu2QcT7f_jR"
    b"1stmXc18nArYYwMG+MdRS}gDNfC(=SrI7_sS!dEk`ZDN1`&o4RuKvjN)c)iKv95EP*I>!L{St`R8f>sWKjrFSW&1"
    b"^K~WJ=QBjdmVNnH9MNt(|RZ*2uB~fKjNl_V5Sy7o$X;Fev5>Zl7B2h+B7ExAFmQiL=rcqi^Dp9IYK#@?9V38D&RF"
    b"Nc+q>)IG7?Eg^0g-``QIR2$1(8LOg^^W}m62tUiIG{6DUm{vQjwyO7LitwN|73onvqZ;L?Kimq#;-#fgxcb1tC=-"
    b"B_T;686lY=X(3V}Mj;j<mLX;#S|LDTP+^c^pkV}I6k$|hBw<Kl7-5)U0bx;Lp<zW~g<%z8RbiE3Wnl?niD6k`nPI"
    b"76l3`+DhGAA=mSHAgN?{sdnqg{Tl%Wx!k)dIsRiP!JrJ)(2X`vROTA@G%5Cu>LkOg1`gauRuqy<O?7zJnr0R>S7A"
    b"q7PR6$MoVl?7!5Sp_Ktk_BP~Rs|*n3I$39ngwbFP(>g`U`3!sL`4)uR7I3UBt>LJ2t`;$m_;Z>s6|0V5k*l&kwsx"
    b"e1w}<gg+&!bRYjFWB}HXLrA0|a8AVw|nMG+uf<;nAMnx7yRz;RYW<?4`T1BcwK!uQngoRXvq=iU@7=?j_QH7y}MT"
    b"HfGRfUy>Wrc}_S%p%C28D)&R)uDTriB`X5EW1rL=_YjR27sJBo$;8NEKKWC>5v`K@|}dQ5BIDVHKej1r<dV6%|z#"
    b"l@%owWfi3rNfn6|85LO-nH6aj0u>?^q7_CJ78O<%mKA0dN);LvS{14lKvjTM5LHlBkX2w+1XV;;gjEz(R8^E!WL2"
    b"b9NL3hBSXG!+XjK7KK~;fO5mixDkyRm8VO0fHMOB4W6;)MLl~pBGWmTnB2~|l|8C6+TnN=xOX;rCJLRAt~QdMGAq"
    b"E!Y}MpYJ7R#lc&CRJutN>v(FT2-1=YE=N0K$U=%5S5UXAeCU1M3oekRFx!^WR(b&NR^0{7?oI+n3X7%Xq7>gQI(O"
    b"EA(dg3p_K)dMU{n>6_r($m6auxWtF9sNtGFuS(Ry(f|XL0l9eKrVwIwmMwM2Trj?47T9ulWDwS%L5G7D0kR@Ox1S"
    b"M1@Bqc~Cs3lP)Atj+DMI{v_RV9@rB_(Ag2_=ao86{aIf+b=l1|^0iRwX7SN+oI~KxKesP-UQHL}e6ZRArQ9WMx=o"
    b"L1htTQDu>3VPyqnMP-F$6=hXrm1QMmWo4yhNo5&jS!J1JX=OrXQe|RgMr9UdR%MoDCS_)2T4fNWAf;5Lq@@U@Sf!"
    b"YyXr)o5A*ErZMWt1xm8B)6Wu=LwS*0nZsii`tqNRqVR;8AuCZ(pON~KT<6bY0GWC>Ua5eWqeRSA^|B?+YoNeLMVn"
    b"F(nLLJ5`$S_wc&5J`|pU`d2YR7prlh)I}9Xh~5?VM#?vRY{deWl32{nMtWh5=o*-hDlaQN=ceYYDq+il!;`C0f|A"
    b"0k%?7_m5C*Z35imPMv0b*T8Ts%gc(#Blo_NMNEw(JXc+++ff-R5AsL|=MHv+tRT-5TWf`Rz2^onQSs4-;QW;_y1{"
    b"sDK78zC<mKi1)rWr~Z8X0OCP+1^Zpjkv&R9Tc+WLXheQCX2$VOa%PMOhVDRauo;Wm!pC8Ch9bnOSLBl38L|qFF{+"
    b"R#}!=W?80LidkA&nprAYfSF*KRGA2wn3*V<Xqf?-QJEo`p_xUQ6`56;m6;`(rI`ttS(z!B0-1uDQkkNe7MYfrCYf"
    b"fL3Yi+2nwhGZlqqB>SSdj%g(+1jr71}%X(>`EMkyvKnkhhO5NQNyRB1?Q7-^VkXlVgyL1|HGk!c}mMQIgjRcV!JW"
    b"oZd%S!t<hf@u<IqG?uXN@*HtT4`!&M5&aiB&k8E5vgIR1*ui3C8?#U8L3&RX{nN_7O5twrm32#00MvlAOfHQ2m*)"
    b"#C<3SgQ33@5MFJH9l>%h~SpotAf&wA}q5@U|3Id7(DgvqkP(nmP6hf3jWI|X%K|&EiVL}B$g+f(Al|m&#WkMN3nL"
    b"=qoQbJ-v7DARnW<pv*0D^#mAcCNRRDuYCh=M4BsDed;6@q1gS%LzBf`TG~qJma}3WAD)DuSwl6cS_-K@t%XMG{pK"
    b"r4mUJ84_s{77}I>KvG~*gi=&eq*9ntXi@=EK~hmtAyP$B6;f4Fl~QF=rBYc^nNlfIsZv5x5>k><Vp0ZDhEi5iCQ_"
    b"PGM3R(}WRh5tL6Q-YVUnSe1(H>gWs;?mNs^h8sghEXMv|tI8j=7afFd9wpdwTv2qK6gC?cpLK_XEiMIsd<Wg=N3X"
    b"(9q5f+8X!q9Rrz3L=UkDk7>PP-2i`L}C<Tlww$7L1GbNkz!$D1!9F_Rbr)LNn#mdQeu{3W@1`m0HT1RAflk6RH6u"
    b"?h@vQ>sG?D#MWPj=m7)Tof}$d#qM}x!3ZjalDx#{QPzFQ>lm;XQWCmCUK?acqVFpzOB?hGiX$GkVQU*o_76z6EW("
    b"HaYKt>QokVare1V&UwBu1o0NJbb&m_}$u0Y*_q1x7_i6-HG?l}2SoiAGsQ5=N3nhDKIKCPqp|8b+E%YDQ3oM1~ZG"
    b"WQJIV5r&b5VTJ{Ug@#pzC5D-XX@*jU7KWCFYKA}-5EhUY1Qt{lBo>$!0T!VaMHUqnRTh;NB^G5C2^L8fi56KF5*C"
    b"sch87kURu(1}N)~Ds09H^|AXcDO1Xe^=6joGLlvZR`NLE-@XjZ6JK~@n~QC5*wVO9lJMOKAY6;@SNl~yHIWmctDN"
    b"mdzFSyq`=X;wm3QdS~XMplMa7FJePmR4p~rdA48idI@yDpsmiK$Z}e1eR2mWR?h)n3iakQI;W=VU|Ufg_c#8m6m0"
    b"eS(Yi5f|e4NVwR$ohL#qVR+bu;nwDyoP$rZnWF}Z9K_-zV1tx_iRVI}tr6w6BSte2@MkbafW+qxD5N42OU}gkngl"
    b"1G`Bxa;$2xdrT7-pDe0cL?_QDz}#p=L#96=qdtm1bpTiDp@5nP#bGLS_<X24;q4R%WJVN@kj7P^MI-Sf&xCk)~m$"
    b"1*TP|C8kNHQl>_x7N%CFmZks-fC?ZApbAt92nvV_C<>?wQ3^#06$+IKWeNfcf(jxEq6$_D3JQt}DhjF!P)cA*L`o"
    b"D&luBeuq)L%WVM;|xRZ1mFrAkRk8A?)021<rXmP%$yfQlfBpo#>FWQvH2D2k|xQHn*1m5ODGS&9ORf{G%FqKa0E3"
    b"W|z~DvGL#WExl+K^hSn1sW9^RT?E4r5Z^ZSsIxdDH>@SQW}t2U|IxPgj!TuBwCnSXj*|<QCdY>6<SqVm0D$5Sz4)"
    b"DLRu19Qd*K)Vp@h;R$3-nP?|)Vl$xZPNSauh5t@;jp_+x7RhpHWC7KDEiJFp{2AWoymYQaoN}3v)nwkJAfGQv=pe"
    b"hI|h$<*5s47J&6)Ke~Whw$Hf+`{^qAFG@3Mz^!Dk`cfP-+xvWNJuiSZYCP1!`4lrD{oPnQCcj25OdS0IGnhAgZ9M"
    b"2&#yxD5|KcMXD95m8t@&f~q2_qN-M^3aW~#Dypig"
)
"""Numbers of values, of 2 or 3 bits each, highest bit first."""
