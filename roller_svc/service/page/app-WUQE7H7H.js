import{$ as Oe,A as P,B as Bt,C as et,D as yt,E as G,F as Dt,G as xt,H as wt,I as J,J as C,K as Kt,L as kt,M as Ht,N as Mt,O as ge,P as T,Q as Ft,R as W,S as be,T as ve,U as ye,V as xe,W as we,X as ke,Y as Ut,Z as Ot,_ as Me,aa as _e,ba as Te,c as ae,ca as Gt,d as ie,da as V,e as le,ea as _t,f as Q,fa as Se,g as ot,ga as Ce,h as gt,ha as Ee,i as ce,j as ue,k as bt,l as de,m as U,n as Rt,o as $e,p as It,q as pe,r as q,s as qt,t as me,u as Pt,v as tt,w as vt,x as g,y as fe,z as he}from"./chunk-NYYJ5IRM.js";import{A as ft,D as ht,a as ee,b as O,c as S,d as $t,e as o,f as h,g as w,h as I,i as A,j as Z,k as y,l as F,m as pt,n as rt,o as Nt,p as k,q as se,w as ne,x as re,y as oe,z as mt}from"./chunk-PCYESTOY.js";var Jt=["mma","fma","wgmma","mfma","compute"],ds=["exponentials","transform","update","packing"],$s={launch:"var(--launch)",exposed:"var(--exposed)"};function _(t,e){let s=t.levels.map(r=>r.name),[a,n]=t.tile_levels;return e===n?"var(--thread)":e===a?"var(--block)":e===s[0]?"var(--outer)":s.includes(e)?s.indexOf(e)<s.indexOf(a)?"var(--between)":"var(--inner)":Jt.includes(e)||e==="arithmetic"?"var(--compute)":ds.includes(e)?"var(--special)":$s[e]??"var(--other)"}var B=(t,e)=>`color-mix(in oklab, ${_(t,e)} 70%, var(--ink))`;var at=560,E=300,Tt=70,St=78,H=12,K=36,st={x:at-42,columns:2,rows:15},D=4,Le=t=>t.outcome==="accepted",ps=t=>t.outcome==="rejected",Wt=(t,e)=>t.kind==="scale-up"&&!e.saturated;function ms(t,e){let s=[];for(let a=e;a!=null;a=t[a].parent)s.push(a);return s}function fs(t){return t.filter(s=>s.traffic_bytes>0).length?{read:s=>s.traffic_bytes,show:w,title:"traffic from the level outside"}:{read:s=>s.seconds,show:h,title:"estimate of the best program with it"}}var je=(t,e,s,a)=>n=>s+(a-s)*Math.log(n/t)/Math.log(e/t);function Ae(t,e){let s=t.filter(a=>a>0);return s.length?[Math.min(...s)/e,Math.max(...s)*e]:[1,2]}function hs([t,e]){let s=Math.ceil(Math.log2(t)),a=Math.floor(Math.log2(e)),n=Math.ceil((a-s+1)/8)||1;return Array.from({length:Math.max(0,Math.floor((a-s)/n)+1)},(r,i)=>2**(s+i*n))}function gs(t,e){let s=fs(t),a=t.filter(u=>s.read(u)>0),n=Ae([...a.map(u=>u.footprint_bytes),e],1.5),r=Ae(a.map(s.read),1.2),i=je(...n,Tt,at-St),l=je(...r,E-K,H),d=0;return{points:t.map(u=>{if(u.footprint_bytes>0&&s.read(u)>0)return[i(u.footprint_bytes),l(s.read(u))];let v=d++%(st.columns*st.rows);return[st.x+16*(v%st.columns),H+24+15*Math.floor(v/st.columns)]}),x:i,y:l,xs:n,ys:r,upright:s,refused:d}}function Ne({tried:t,now:e}){let{device:s}=g.value,a=t.steps,n=_(s,t.level),r=t.capacity_bytes,{points:i,x:l,y:d,xs:c,ys:u,upright:v,refused:$}=gs(a,r),f=new Set(ms(a,e)),m=new Set((T.value?.found??[]).filter(p=>p.search===C.value).map(p=>p.step)),b=`${k(a.length,"tile")} tried for ${t.level}: footprint against ${v.title}`;return o`<svg viewBox=${`0 0 ${at} ${E}`} class="landscape" role="img" aria-label=${b} data-testid="tiles">
    ${hs(c).map(p=>o`<line x1=${l(p)} x2=${l(p)} y1=${H} y2=${E-K} class="grid" />
      <text x=${l(p)} y=${E-K+13} class="tick" text-anchor="middle">${w(p)}</text>`)}
    <line x1=${Tt} x2=${at-St} y1=${E-K} y2=${E-K} class="axis-line" />
    <text x=${(Tt+at-St)/2} y=${E-4} class="label" text-anchor="middle">footprint in ${t.level}</text>
    <text x=${-(E-K)/2} y="11" class="label" text-anchor="middle" transform="rotate(-90)">${v.title}</text>
    ${[u[0]*1.2,Math.sqrt(u[0]*u[1]),u[1]/1.2].map(p=>o`<text x=${Tt-5} y=${d(p)+3} class="tick" text-anchor="end">${v.show(p)}</text>`)}
    ${r>0&&o`<rect x=${l(r)} y=${H} width=${at-St-l(r)+14} height=${E-K-H} class="wall" />
      <line x1=${l(r)} x2=${l(r)} y1=${H} y2=${E-K} style=${`stroke:${n};stroke-width:1.5`} />
      <text x=${l(r)-4} y=${H+8} class="tick" text-anchor="end" style=${`fill:${B(s,t.level)}`}>capacity ${w(r)}</text>`}
    ${$>0&&o`<text x=${st.x+8} y=${H+8} class="tick" text-anchor="middle">refused early</text>`}
    ${a.map((p,M)=>p.parent!=null&&o`<line x1=${i[p.parent][0]} y1=${i[p.parent][1]} x2=${i[M][0]} y2=${i[M][1]}
      class=${f.has(M)?"edge on":M<=e?"edge":"edge later"} style=${f.has(M)?`stroke:${n}`:""} />`)}
    ${a.map((p,M)=>{let[L,N]=i[M];return o`<g class=${M>e?"spot later":"spot"} onClick=${()=>V(C.value,M)}>
        <circle cx=${L} cy=${N} r="9" fill="transparent" />
        ${ps(p)?o`<path d=${`M${L-D} ${N-D}l${2*D} ${2*D}m0-${2*D}l-${2*D} ${2*D}`} class="cross" />`:o`<circle cx=${L} cy=${N} r=${D} style=${Wt(t,p)?`fill:var(--paper);stroke:${n};stroke-width:1.5`:`fill:${n}`} />`}
        ${m.has(M)&&o`<circle cx=${L} cy=${N} r="8" class="won" />`}${M===e&&o`<circle cx=${L} cy=${N} r="11" class="now" />`}
        <title>${rt(t.axes,p.tile)}: ${p.footprint_bytes>0?w(p.footprint_bytes):"no footprint"}, ${p.limit?.rule??p.outcome}${p.seconds?`, ${h(p.seconds)}`:""}</title>
      </g>`})}
  </svg>`}var Re=({tried:t})=>o`<ul class="legend">
  ${t.kind==="scale-up"&&o`<li><i class="ring" style=${`--c:${_(g.value.device,t.level)}`}></i>fits</li>
    <li><i class="disc" style=${`--c:${_(g.value.device,t.level)}`}></i>fits and is large enough</li>`}
  <li><i class="bad">✕</i>refused</li><li><i class="ring" style="--c:var(--ink)"></i>of the chosen program</li></ul>`;var Vt=168,bs=64,vs=["k","inner","reduce","tap"];function ys({roles:t,extents:e}){let s=i=>t.indexOf(i);if(s("m")>=0&&s("n")>=0)return[s("m"),s("n"),s("k")];let a=t.map((i,l)=>l).filter(i=>!vs.includes(t[i])),[n=0,r=n]=a.sort((i,l)=>e[l]-e[i]).slice(0,2).sort((i,l)=>i-l);return[n,r,s("k")]}function xs(t,e){let[s,a]=g.value.device.tile_levels,n=T.value?.program.tiles,r=n&&Object.keys(n[s]??{}).join()===t.axes.join(),i=l=>t.axes.map(d=>n[l]?.[d]??1);return t.level===s?{block:e.tile,thread:e.base??t.base??(r?i(a):e.tile)}:{block:r?i(s):e.tile,thread:e.tile}}function ws({name:t,size:e,inner:s,colour:a,innerColour:n,axes:[r,i,l],names:d,depth:c,note:u}){let v=Math.max(e[r],e[i]),$=c?Math.min(c,v):0,f=Vt/(v+$),m=Math.max(3,e[i]*f),b=Math.max(3,e[r]*f),p=$&&Math.max(4,$*f),M=s?Math.max(2,Math.min(m,s[i]*f)):0,L=s?Math.max(2,Math.min(b,s[r]*f)):0,N=(R,dt)=>dt>3&&R/dt>1.5?Array.from({length:Math.min(Math.round(R/dt),bs)-1},(Wa,us)=>dt*(us+1)):[],cs=`${t}: ${d[r]} ${e[r]} by ${d[i]} ${e[i]}${c?`, ${d[l]} ${c}`:""}`;return o`<figure><svg viewBox=${`-20 -16 ${Vt+24} ${Vt+26}`} role="img" aria-label=${cs}>
    ${p>0&&o`<rect y=${p} width=${p} height=${b} class="strip" /><rect x=${p} width=${m} height=${p} class="strip" />
      <text x=${p/2} y=${p-3} class="tick" text-anchor="middle">${p>14?`${d[l]} ${c}`:""}</text>`}
    <g transform=${`translate(${p} ${p})`}>
      <rect width=${m} height=${b} style=${`fill:color-mix(in oklab, ${a} 13%, transparent);stroke:${a};stroke-width:1.5`} />
      ${N(m,M).map(R=>o`<line x1=${R} x2=${R} y2=${b} class="hair" style=${`stroke:${a}`} />`)}
      ${N(b,L).map(R=>o`<line y1=${R} y2=${R} x2=${m} class="hair" style=${`stroke:${a}`} />`)}
      ${s&&o`<rect width=${M} height=${L} style=${`fill:${n}`} opacity="0.85" />`}</g>
    <text x=${p+m/2} y="-5" class="tick" text-anchor="middle">${d[i]} ${e[i]}</text>
    <text transform=${`translate(-7 ${p+b/2}) rotate(-90)`} class="tick" text-anchor="middle">${d[r]} ${e[r]}</text>
  </svg><figcaption><b style=${`color:color-mix(in oklab, ${a} 70%, var(--ink))`}>${t}</b><span>${u}</span></figcaption></figure>`}function ks({axis:t,role:e,thread:s,block:a,whole:n}){let r=i=>n>1?Math.min(1,Math.log2(Math.max(1,i))/Math.log2(n)):1;return o`<div class="ruler"><span>${t}${e!==t&&o`<small>${e}</small>`}</span>
    <svg width="100%" height="12" role="img" aria-label=${`${t}: ${s} of ${a} of ${n}`}>
      <rect y="4" height="4" width="100%" class="track" /><rect y="2" height="8" width=${`${100*r(a)}%`} style="fill:var(--block)" opacity=".75" />
      <rect height="12" width=${`${Math.max(1,100*r(s))}%`} style="fill:var(--thread)" /></svg>
    <em>${s} <i>▸</i> ${a} <i>▸</i> ${n}</em></div>`}function Ie({tried:t,tile:e}){let{device:s}=g.value,[a,n]=s.tile_levels,r=ys(t),[i,l,d]=r,{block:c,thread:u}=xs(t,e),v=t.extents,$=(m,b)=>Math.ceil(m[i]/b[i])*(l===i?1:Math.ceil(m[l]/b[l])),f=[{name:"whole result",size:v,inner:c,colour:"var(--outer)",innerColour:"var(--block)",note:k($(v,c),"tile")},{name:`task in ${a}`,size:c,inner:u,colour:"var(--block)",innerColour:"var(--thread)",depth:d>=0?c[d]:0,note:k($(c,u),"tile")},{name:`tile in ${n}`,size:u,colour:"var(--thread)",note:t.unit}];return o`<div class="nested" data-testid="tile"><div class="frames">${f.map(m=>o`<${ws} ...${m} axes=${r} names=${t.axes} />`)}</div>
    <div class="rulers">${t.axes.map((m,b)=>o`<${ks} axis=${m} role=${t.roles[b]} thread=${u[b]} block=${c[b]} whole=${v[b]} />`)}</div></div>`}var Ms=".cm-editor, input, select, textarea";function Yt({rule:t,needs:e,has:s}){let n=g.value.device.levels.some(({name:r})=>t===r||t.startsWith(`${r} `))||/memory|cache|page/.test(t)?w:Z;return`${t}: needs ${n(e)}, there is ${n(s)}`}function Os(t,e){let s=t.steps[e.parent];if(!s)return t.kind==="scale-up"?"Start":"Tried";if(e.axis==null)return`Made of ${rt(t.axes,s.tile)}`;let a=s.tile[e.axis],n=e.tile[e.axis];return`${t.axes[e.axis]} ${n>a?"grew":"shrank"} ${a} → ${n}`}function _s({tried:t,tile:e}){let s=Os(t,e),a=e.footprint_bytes>0&&t.capacity_bytes>0?`, ${y(e.footprint_bytes/t.capacity_bytes)} of the capacity`:"";if(e.outcome==="rejected")return o`<b>${s}</b>: <span class="bad">stopped by ${e.limit?Yt(e.limit):e.outcome}</span>.`;if(!Le(e))return o`<b>${s}</b>: not aligned yet (${Yt(e.limit)}), so it grows on.`;let n=e.footprint_bytes>0?`fits in ${w(e.footprint_bytes)}${a}.`:"fits.",r=t.kind!=="scale-up"?"":Wt(t,e)?" Memory is still slower than compute: growing pays.":" Compute covers its memory time: it is large enough.";return o`<b>${s}</b>: ${n}${r}${e.seconds>0&&o` The best program with it takes <b>${h(e.seconds)}</b>.`}`}function Ts({tried:t,tile:e}){if(!e.growth?.length)return null;let s=Math.max(1e-30,...e.growth.map(a=>a.reuse??0));return o`<table class="growth"><caption>It could grow along</caption>
    <thead><tr><th>axis</th><th>to</th><th class="r">needs</th><th class="r">moves</th><th>traffic saved per byte</th><th>outcome</th></tr></thead>
    <tbody>${e.growth.map((a,n)=>o`<tr class=${n===0?"first":""}>
      <th scope="row">${t.axes[a.axis]}</th><td>${a.extent}</td>
      <td class="r">${a.footprint_bytes>0?w(a.footprint_bytes):"–"}</td>
      <td class="r">${a.traffic_bytes>0&&e.traffic_bytes>0?y(a.traffic_bytes/e.traffic_bytes):"–"}</td>
      <td class="meter"><i style=${`width:${a.reuse==null?100:Math.max(1,100*a.reuse/s)}%;background:${_(g.value.device,t.level)}`}></i></td>
      <td class=${a.limit?"bad":"quiet"}>${a.limit?Yt(a.limit):a.reuse==null?"costs nothing":n===0?"tried first":""}</td></tr>`)}</tbody></table>`}function Ss(){let t=new Set((T.value?.found??[]).map(s=>s.search)),e=new Map;return g.value.searches.forEach((s,a)=>{let n=[s.group,s.unit,s.view,s.family].filter(Boolean).join(" · ");e.set(n,[...e.get(n)??[],[s,a]])}),o`<select class="picker" aria-label="search" value=${C.value} onChange=${s=>V(Number(s.target.value),0)}>
    ${[...e].map(([s,a])=>o`<optgroup label=${s}>${a.map(([n,r])=>o`<option value=${r} selected=${r===C.value}>
      ${t.has(r)?"● ":""}${n.kind} · ${n.level}${n.base?` on ${n.base.filter(i=>i>1).join("×")||"1"}`:""}: ${k(n.steps.length,"tile")}</option>`)}</optgroup>`)}</select>`}var Cs=()=>o`<div class="chain" role="group" aria-label="tiles of the chosen program">
  ${(T.value?.found??[]).map(t=>{let{level:e}=g.value.searches[t.search];return o`<button class=${t.search===C.value&&t.step===Kt.value?"on":""} style=${`--c:${B(g.value.device,e)}`} onClick=${()=>V(t.search,t.step)}>chosen ${e}</button>`})}</div>`;function qe(){let t=g.value.searches[C.value],e=(t?.steps.length??0)-1,s=Math.min(Kt.value,e),a=r=>V(C.value,Math.max(0,Math.min(e,s+r)));if(S(()=>{let r=i=>{let l={ArrowRight:1,ArrowLeft:-1}[i.key];l&&!i.target.closest?.(Ms)&&!i.altKey&&!i.metaKey&&!i.ctrlKey&&a(l)};return addEventListener("keydown",r),()=>removeEventListener("keydown",r)}),e<0)return o`<section class="panel"><h2>How the tile grew</h2><p class="quiet">This program has no tiles to choose.</p></section>`;let n=t.steps[s];return o`<section class="panel" aria-labelledby="construction-title" data-testid="stepper">
    <header><h2 id="construction-title">How the tile grew</h2><${Ss} /><${Cs} /></header>
    <div class="two"><div>
        <${Ne} tried=${t} now=${s} /><${Re} tried=${t} />
        <div class="scrubber">
          <button data-testid="step-previous" aria-label="previous step" disabled=${s===0} onClick=${()=>a(-1)}>←</button>
          <input type="range" min="0" max=${e} value=${s} aria-label="step" onInput=${r=>V(C.value,Number(r.target.value))} />
          <button data-testid="step-next" aria-label="next step" disabled=${s===e} onClick=${()=>a(1)}>→</button>
          <span>${s+1} of ${e+1}</span></div>
        <p class="saying" aria-live="polite" data-testid="step"><code>${rt(t.axes,n.tile)}</code> <${_s} tried=${t} tile=${n} /></p>
        <${Ts} tried=${t} tile=${n} /></div>
      <${Ie} tried=${t} tile=${n} /></div>
  </section>`}var Es=10;async function js(){let t=W.peek(),e=()=>t===W.peek();try{let s=await ht("/v1/kernels:compile",t);for(;e()&&(wt.value=s,!s.done);)s=await mt(`/v1/${s.name}?wait=${Es}`);e()&&s.response&&await ye(s.response,e)}catch(s){e()&&(wt.value={done:!0,error:ne(s)})}}function As(t){if(!t)return"";if(t.error)return`failed: ${t.error.detail}`;let{stage:e,cache:s,queue_position:a,waiting_for:n}=t.metadata;return t.done?s==="hit"?"compiled before":"compiled":n?`no worker takes from ${n}`:a>0?`queued behind ${a}`:e}function Pe(){let t=wt.value,e=t&&!t.done;return o`<div class="compile">
    <button data-testid="compile" disabled=${!Se.value||e} onClick=${js}>Compile</button>
    <span data-testid="status" role="status" class=${t?.error?"bad":"quiet"}>${e&&o`<i class="busy"></i>`}${As(t)}</span>
  </div>`}var Be=2;function Ns({name:t}){let e=me.value[t]??1;return o`<label class="slider"><span>${t}</span>
    <input type="range" min=${-Be} max=${Be} step=${.5} value=${Math.log2(e)} aria-label=${t} aria-valuetext=${F(e)}
      onChange=${s=>Oe(t,2**Number(s.target.value))} /><em>${F(e)}</em></label>
    ${Pt.value?.name===t&&o`<p class="quiet" data-testid="held" role="status">no further: ${Pt.value.reason}</p>`}`}var De=({kernels:t})=>JSON.stringify(t.map(e=>e.program?.tiles??e.tiles));function Rs(){let t=yt.value.find(a=>a.target===q.value)?.candidates?.[0],e=g.value?.programs[0];if(!tt.value||!t||fe.value!==W.value)return null;let s=1-e.seconds/t.seconds;return o`<p data-testid="effect" role="status">${h(t.seconds)} → <b>${h(e.seconds)}</b>,${" "}
    ${Math.abs(s)<5e-4?"as before":`${y(Math.abs(s))} ${s>0?"less":"more"}`};${" "}
    ${De(t)===De(e)?"the tiles stay":"other tiles win"}.</p>`}function Is(){let t=tt.value??qt.value,[e,s]=O(null),[a,n]=O(null),r=async l=>{s(l.target.value);try{let{hardware:d}=await ht("/v1/hardware:validate",{hardware:l.target.value});n(null),s(null),Me(d)}catch(d){n(d.problem??{detail:d.message,errors:[]})}},i=a&&(a.errors.length?a.errors:[{message:a.detail}]);return o`<details><summary>as text</summary>
    <textarea aria-label="spec as text" rows="12" spellcheck="false" value=${e??JSON.stringify(t,null,1)} onChange=${r}></textarea>
    ${i?.map(l=>o`<p class="bad" role="alert">${l.line&&o`<b>${l.line}:${l.column}</b> `}${l.message}</p>`)}</details>`}function Ke(){let t=tt.value??qt.value,[e,s]=O(!1),a=({currentTarget:{open:n}})=>{s(n),n&&_e()};return o`<details class="spec" data-testid="spec" open=${e||tt.value!==null} onToggle=${a}>
    <summary>Another device: what if …</summary>
    ${t&&o`${Object.keys(de(t)).map(n=>o`<${Ns} name=${n} />`)}<${Rs} />
      ${tt.value&&vt.value.some(n=>n.id===q.value)&&o`<button onClick=${()=>Ot(q.value)}>as it is</button>`}<${Is} />`}
  </details>`}var qs=180,Ps=["float32","float16","bfloat16","float64","float8_e4m3","float8_e5m2","int8","uint8","int16","int32","int64","bool"];function Bs(){let t=$t(),e=$t(),s=$t();S(()=>{let r,i=!1;return import("./editor-VSO2J4KC.js").then(({createEditor:l})=>{if(i)return;let d=c=>{clearTimeout(r),r=setTimeout(()=>we(s.current=c),qs)};t.current.textContent="",e.current=l(t.current,U.peek(),d),e.current.mark(P.peek()?.errors??[])}),()=>{i=!0,e.current?.destroy()}},[]);let a=U.value,n=P.value;return S(()=>{a!==s.current&&e.current?.show(a)},[a]),S(()=>e.current?.mark(n?.errors??[]),[n]),o`<div class=${n?.errors.some(r=>r.line)?"editor wrong":"editor"} ref=${t}><pre>${U.peek()}</pre></div>`}function Ds(){let t=P.value,e=he.value,s=t?.errors.length?t.errors:t?[{message:t.detail}]:[];return o`<div class="diagnostics" data-testid="diagnostics" role="status">
    ${s.map(a=>o`<p><b>${a.line?`${a.line}:${a.column}`:Ks(a.pointer)??t.code}</b> ${a.message}
      ${a.hint&&o`<span>${a.hint}</span>`}</p>`)}
    ${t&&!_t.value&&o`<p><button data-testid="again" onClick=${Ce}>ask again</button></p>`}
    ${Bt.value&&o`<p class="bad" data-testid="trouble">${Bt.value}</p>`}
    ${et.value&&o`<p class="quiet">explaining…</p>`}
    ${!t&&!et.value&&e!=null&&o`<p class="quiet">explained in ${Math.round(e)} ms</p>`}
  </div>`}var Ks=t=>t?.replace(/^\/inputs\//,"").replaceAll("/"," "),Hs=t=>t.trim()?t.split(/[^\d]+/).filter(Boolean).map(Number):[];function Fs(){let t=Object.entries(Rt.value);return t.length?o`<table class="inputs"><caption class="unseen">Inputs</caption>
    <thead><tr><th>input</th><th>type</th><th>shape</th><th title="does not change from call to call, such as weights">fixed</th></tr></thead>
    <tbody>${t.map(([e,{dtype:s,shape:a}])=>o`<tr key=${e}>
      <th scope="row">${e}</th>
      <td><select aria-label=${`type of ${e}`} value=${s} onChange=${n=>Ut(e,{dtype:n.target.value,shape:a})}>
        ${[...new Set([...Ps,s])].map(n=>o`<option selected=${n===s}>${n}</option>`)}</select></td>
      <td><input aria-label=${`shape of ${e}`} value=${a.join(" × ")} inputmode="numeric"
        onChange=${n=>Ut(e,{dtype:s,shape:Hs(n.target.value)})} /></td>
      <td><input type="checkbox" aria-label=${`${e} is constant`} checked=${$e.value.includes(e)}
        onChange=${n=>Te(e,n.target.checked)} /></td>
    </tr>`)}</tbody></table>`:null}function Us(){let t={...It.value&&{outputs:It.value},...pe.value};return Object.keys(t).length?o`<p class="quiet" data-testid="options">${Object.entries(t).map(([e,s])=>`${e} ${typeof s=="string"?s:JSON.stringify(s)}`).join(" · ")}
    <button onClick=${ke}>without</button></p>`:null}function Gs(){let t=g.value?.device;return t?o`<section class="device"><h2>${t.name}</h2>
    <p class="quiet">${k(t.cores,"core")} · ${t.levels.filter(e=>e.name!==t.tile_levels[1]).map(e=>o`<span style=${`color:${B(t,e.name)}`}>${e.name} ${A(e.bandwidth_bytes_per_s,"B")}${e.assumed?"?":""}</span> `)}</p></section>`:null}function Js(t){let e=t.candidates?.[0];return e?{target:t.target,seconds:e.seconds,bound:e.bound,floor:t.floor.seconds}:{target:t.target,refused:t.error?.detail??"no candidate"}}var Ws=8;function Vs(){let t=yt.value.map(Js),e=t.length?t:vt.value.map(r=>({target:r.id}));e.sort((r,i)=>(r.seconds??1/0)-(i.seconds??1/0));let s=Ws*(e[0]?.seconds??1),a=Math.min(s,Math.max(...e.map(r=>r.seconds??0))),n=r=>`${Math.min(100,100*r/a)}%`;return o`<section class="elsewhere" data-testid="target"><h2>Devices</h2>
    ${e.map(r=>o`<button key=${r.target} data-testid=${`target-${r.target}`} class=${r.target===q.value?"on":""}
      aria-pressed=${r.target===q.value} title=${r.refused??`bound by ${r.bound}`} onClick=${()=>Ot(r.target)}>
      <span>${se(r.target)}</span>
      ${r.seconds?o`<svg height="10" width="100%" aria-hidden="true">
          <rect width=${n(r.seconds)} height="10" class=${r.seconds>a?"estimate cut":"estimate"} />
          <rect width=${n(r.floor)} height="10" class="floor" /></svg><em>${h(r.seconds)}</em>`:o`<small>${r.refused?"refused":""}</small><em></em>`}
    </button>`)}
    ${t.length>0&&o`<p class="quiet">Dark: no tiles go below this on the device.</p>`}</section>`}function He(){let t=bt.findIndex(e=>e.expression===U.value&&e.target===q.value&&JSON.stringify(e.inputs)===JSON.stringify(Rt.value));return o`<aside class="desk" aria-label="Program">
    <select class="examples" aria-label="example" value=${t} onChange=${e=>xe(bt[e.target.value])}>
      ${t<0&&o`<option value="-1" selected>examples…</option>`}
      ${bt.map((e,s)=>o`<option value=${s} selected=${s===t}>${e.name}</option>`)}</select>
    <${Bs} /><${Ds} /><${Fs} /><${Us} /><${Pe} /><${Gs} /><${Ke} /><${Vs} />
  </aside>`}var Ys="[\\x21-\\x7e]+";function Fe({load:t}){return re.value?o`<form class="key" onSubmit=${s=>{s.preventDefault(),oe(new FormData(s.currentTarget).get("key")),t()}}>
    <label>This service needs an API key <input name="key" type="password" autocomplete="off" required pattern=${Ys} title="letters, digits and signs of ASCII, without spaces" autofocus /></label>
    <button>use it in this tab</button>
  </form>`:null}var Ue=()=>o`<svg width="0" height="0" aria-hidden="true" class="unseen"><defs>
  <pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <rect width="5" height="5" style="fill:var(--paper-2)" /><rect width="2.4" height="5" style="fill:var(--exposed)" />
  </pattern></defs></svg>`,x=({seconds:t,fraction:e=1})=>e*t,zs=(t,e)=>x(e)-x(t),Xs=t=>t.reduce((e,s)=>e+x(s),0),Y=(t,e)=>t.terms.filter(s=>s.combines===e&&x(s)>0).sort(zs);function it(t){let e=Y(t,"sums");return[...Y(t,"overlaps").map(a=>[a]),...e.length?[e]:[]].map(a=>({terms:a,name:a.map(n=>n.name).join(" + "),seconds:Xs(a)})).sort((a,n)=>n.seconds-a.seconds)}var Xt=t=>[...Y(t,"adds"),...Y(t,"after")];function Zs(t){let e=[],s=[],a=0,n=(r,i)=>{e.push({name:r,seconds:i,start:a}),a+=i};for(let r of t){let i=a,[l,...d]=it(r);for(let u of l?.terms??[])n(u.name,x(u));for(let u of d)s.push({name:u.terms[0].name,label:u.name,seconds:u.seconds,at:i+u.seconds});for(let u of Y(r,"adds"))n(u.name,x(u));let[c]=Y(r,"floor");c&&x(c)>a-i&&n(c.name,x(c)-(a-i));for(let u of Y(r,"after"))n(u.name,x(u))}return{parts:e,marks:s}}function Ct({kernels:t,device:e,longest:s,height:a=14}){let{parts:n,marks:r}=Zs(t),i=c=>`${100*c/s}%`,l=c=>c==="exposed"?"url(#hatch)":_(e,c),d=n.map(c=>`${c.name} ${h(c.seconds)}`).join(", then ");return o`<svg class="terms" width="100%" height=${a} role="img" aria-label=${d}>
    ${n.map(c=>o`<rect x=${i(c.start)} width=${i(c.seconds)} height=${a} style=${`fill:${l(c.name)}`}>
      <title>${c.name}: ${h(c.seconds)}</title></rect>`)}
    ${n.slice(1).map(c=>o`<line x1=${i(c.start)} x2=${i(c.start)} y2=${a} class="cut" />`)}
    ${r.map(c=>o`<line x1=${i(c.at)} x2=${i(c.at)} y1="2" y2=${a} class="under" />
      <line x1=${i(c.at)} x2=${i(c.at)} y1="2" y2=${a} style=${`stroke:${l(c.name)};stroke-width:2`}>
        <title>${c.label} would be done after ${h(c.seconds)}</title></line>`)}
  </svg>`}function Ge({kernels:t,device:e}){let s=new Map;for(let a of t.flatMap(n=>n.terms))s.set(a.name,(s.get(a.name)??0)+x(a));return o`<ul class="legend">${[...s].map(([a,n])=>o`<li>
    <i class=${a==="exposed"?"dot hatched":"dot"} style=${`--c:${_(e,a)}`}></i>${a}<em>${h(n)}</em></li>`)}</ul>`}var Zt=6,Qs=2.5,ta=["contraction","attention",""],ea=[["split_k",1,t=>`split-k ${t}`],["stages",1,t=>`${t} stages`],["stream_k",0,t=>`stream-k ${t}`],["pingpong",0,()=>"ping-pong"],["blocks",0,t=>`${t} persistent`],["raster",1,t=>`raster ${t}`]];function sa(t){let e=ea.filter(([a,n])=>t[a]>n).map(([a,,n])=>n(t[a])),s=[t.cluster_m,t.cluster_n,t.cluster_k].filter(a=>a>1);return[...e,s.length&&`cluster ${s.join("×")}`].filter(Boolean).join(", ")}var aa=t=>k(Q(t).length,"kernel")+(ot(t).length?`, ${ot(t).length} once`:""),Je=(t,e)=>Object.entries(t.tiles[e]??{}).filter(([,s])=>s>1).map(([s,a])=>o`<span class="axis">${s}<b>${a}</b></span>`);function na({program:t}){let e=Dt.value[le(t)],s=t.seconds/e-1;return e?o`<td class="r">${h(e)}</td><td class="r">${y(Math.abs(s))} ${s>0?"high":"low"}</td>`:o`<td class="r">–</td><td class="r"></td>`}function We(){let[t,e]=O(!1),{device:s,programs:a,constructions:n}=g.value,[r,i]=s.tile_levels,l=n.reduce((f,m)=>f+m.tiles_visited,0),d=n.flatMap(f=>f.refusals),c=t||J.value>=Zt?a:a.slice(0,Zt),u=Math.min(Math.max(...c.map(f=>f.seconds)),Qs*a[0].seconds),v=Object.keys(Dt.value).length>0,$=(f,m)=>{let b={ArrowDown:m+1,ArrowUp:m-1,Enter:m," ":m}[f.key];b===void 0||!c[b]||(f.preventDefault(),Gt(b),f.currentTarget.parentNode.children[b].focus())};return o`<section class="panel" aria-labelledby="programs-title">
    <header><h2 id="programs-title">Ranked programs</h2><span class="quiet">the best of ${k(l,"tile")} · ↑ ↓ choose</span></header>
    <div class="scroll" tabindex="0" role="group" aria-label="table of programs"><table class="programs" data-testid="programs">
      <thead><tr><th class="r">#</th><th>unit</th><th>${r} tile</th><th>${i} tile</th><th>options</th><th class="wide">terms</th><th class="r">estimate</th>${v&&o`<th class="r">measured</th><th class="r">estimate is</th>`}<th class="r">waves</th><th class="r">occ.</th></tr></thead>
      <tbody>${c.map((f,m)=>{let b=gt(f),p=b.program;return o`<tr key=${m} tabindex=${m===J.value?0:-1} aria-current=${m===J.value} data-testid=${`program-${m}`} class=${m===J.value?"on":""}
          onClick=${()=>Gt(m)} onKeyDown=${M=>$(M,m)}>
          <td class="r">${m+1}</td>
          <td>${p.unit}${!ta.includes(b.view??"")&&o`<small>${b.view}</small>`}${f.kernels.length>1&&o`<small>${aa(f)}</small>`}</td>
          <td>${Je(p,r)}</td><td>${Je(p,i)}</td><td class="options">${sa(p)}</td>
          <td class="wide"><${Ct} kernels=${Q(f)} device=${s} longest=${u} /></td>
          <td class="r strong">${h(f.seconds)}</td>${v&&o`<${na} program=${f} />`}<td class="r">${b.waves}</td><td class="r">${y(b.occupancy)}</td></tr>`})}</tbody></table></div>
    ${a.length>Zt&&o`<button class="more" onClick=${()=>e(!t)}>${t?"fewer":`all ${a.length}`}</button>`}
    ${d.length>0&&o`<details class="quiet"><summary>${k(d.length,"unit")} refused</summary><ul>${d.map(f=>o`<li>${f}</li>`)}</ul></details>`}
  </section>`}function Ve(t,e){let s=t.split(`
`),a=e.split(`
`),n=0,r=0;for(;n<s.length&&n<a.length&&s[n]===a[n];)n++;for(;r<s.length-n&&r<a.length-n&&s.at(-1-r)===a.at(-1-r);)r++;let i=l=>l.map(d=>[" ",d]);return[...i(s.slice(0,n)),...ra(s.slice(n,s.length-r),a.slice(n,a.length-r)),...i(s.slice(s.length-r))]}function ra(t,e){let s=oa(t,e),a=[];if(!s)return[...t.map(i=>["-",i]),...e.map(i=>["+",i])];let n=t.length,r=e.length;for(let i=s.length-1;i>0;i--){let l=n-r,d=Ye(s[i-1],l,i),c=d?l+1:l-1,u=s[i-1].get(c),v=u-c;for(;n>(d?u:u+1);)a.push([" ",t[--n]]);a.push(d?["+",e[v]]:["-",t[u]]),[n,r]=[u,v]}for(;n>0;)a.push([" ",t[--n]]);return a.reverse()}var Ye=(t,e,s)=>e===-s||e!==s&&(t.get(e-1)??-1)<(t.get(e+1)??-1);function oa(t,e){let s=[],a=new Map([[1,0]]);for(let n=0;n<=Math.min(800,t.length+e.length);n++){let r=new Map;for(let i=-n;i<=n;i+=2){let l=Ye(a,i,n)?a.get(i+1):a.get(i-1)+1;for(;l<t.length&&l-i<e.length&&t[l]===e[l-i];)l++;if(r.set(i,l),l>=t.length&&l-i>=e.length)return[...s,r]}s.push(r),a=r}return null}var ze=3,ia={"-":"this kernel alone","+":"the other alone"};async function la(t){let e=`/v1/kernels/${encodeURIComponent(t)}`,[s,a,n]=await Promise.all([mt(e),ve(e),ft(`${e}/source`)]),r=ie(a,s);return{facts:s,source:n,program:r&&gt(r.story.programs[r.number]).program}}function ca({facts:t,program:e}){let s=Object.entries(e?.tiles??{}).map(([n,r])=>[`tile in ${n}`,Object.entries(r).map(i=>i.join(" ")).join(" · ")]),a=Object.entries(e??{}).filter(([,n])=>["string","number","boolean"].includes(typeof n));return new Map([["program",t.expression],["device",t.target],["estimate",h(t.estimate?.seconds)],["measured",h(t.measurement?.median_s)],...s,...a.map(([n,r])=>[n.replaceAll("_"," "),String(r)]),...ue(t)])}function ua({pair:t}){let[e,s]=t.map(ca),a=[...new Set([...e.keys(),...s.keys()])].filter(n=>e.get(n)!==s.get(n));return a.length?o`<div class="scroll" tabindex="0" role="group" aria-label="table of differences"><table class="programs" data-testid="differences"><thead><tr><th>differs in</th><th>this kernel</th><th>the other</th></tr></thead>
    <tbody>${a.map(n=>o`<tr><th scope="row">${n}</th><td>${e.get(n)??"–"}</td><td>${s.get(n)??"–"}</td></tr>`)}</tbody></table></div>`:o`<p class="quiet">Their tiles and figures are equal.</p>`}function da(t){let e=t.map(()=>!1);return t.forEach(([s],a)=>{s!==" "&&e.fill(!0,Math.max(0,a-ze),a+ze+1)}),e}function $a({pair:t}){let e=Ve(t[0].source,t[1].source),s=da(e),a=e.filter(([r])=>r==="-").length,n=e.filter(([r])=>r==="+").length;return!a&&!n?o`<p class="quiet">Their texts are equal.</p>`:o`<p class="quiet">${k(a,"line")} of this kernel alone (−), ${Z(n)} of the other (+)</p>
    <div class="listing" data-testid="difference" tabindex="0" role="group" aria-label="difference of the texts"><pre>${e.map(([r,i],l)=>s[l]?o`<span class=${`line ${{"-":"removed","+":"added"}[r]??""}`} title=${ia[r]}><i class="at">${r}</i>${i}${`
`}</span>`:s[l-1]&&o`<span class="line quiet"><i class="at">⋯</i>${`
`}</span>`)}</pre></div>`}function Xe({kernel:t}){let[e,s]=O(null),[a,n]=O(""),r=Ht.value;return S(()=>{let l=!1;return s(null),r&&Promise.all([t.digest,r].map(la)).then(d=>l||s({pair:d}),d=>l||s({error:d.message})),()=>l=!0},[t.digest,r]),o`<div class="compare"><h3>Compare</h3>
    <form class="choices" onSubmit=${l=>{l.preventDefault();let d=new FormData(l.currentTarget).get("other").trim(),c=ae(d);n(d&&!c?`expected the link of a compiled kernel, or sha256: and 64 hexadecimal digits, got ${d.slice(0,100)}`:""),Ht.value=c??""}}><label>with the link or digest of another kernel <input name="other" data-testid="compare" defaultValue=${r} autocomplete="off" /></label><button>compare</button></form>
    ${a&&o`<p class="bad" role="alert" data-testid="fault">${a}</p>`}
    ${e?.error&&o`<p class="bad" role="status">${e.error}</p>`}
    ${e?.pair&&o`<${ua} pair=${e.pair} /><${$a} pair=${e.pair} />`}</div>`}var pa=({dtype:t,shape:e})=>`("${t}", (${e.join(", ")}${e.length===1?",":""}))`,ma=t=>t.includes(`
`)?`"""
${t.replaceAll("\\","\\\\").replaceAll('"""','\\"\\"\\"')}
"""`:JSON.stringify(t);function Qt(t){return t===null?"None":typeof t=="boolean"?t?"True":"False":Array.isArray(t)?`[${t.map(Qt).join(", ")}]`:typeof t=="object"?`{${Object.entries(t).map(([e,s])=>`${JSON.stringify(e)}: ${Qt(s)}`).join(", ")}}`:JSON.stringify(t)}function fa({expression:t,inputs:e,outputs:s,target:a,hardware:n,options:r}){let i=Object.entries(e).map(([c,u])=>`        "${c}": ${pa(u)},`),l=Object.entries({...s&&{outputs:s},...r}).map(([c,u])=>`    ${c}=${Qt(u)},
`),d=Object.keys(e).map(c=>`"${c}": ${c}`).join(", ");return`import roller_svc

kernel = roller_svc.compile(
    ${ma(t)},
    inputs={
${i.join(`
`)}
    },
    ${n?"hardware=spec,  # the changed spec: YAML or JSON text":`target=${JSON.stringify(a)}`},
${l.join("")})
results = kernel.run({${d}})`}var ha=t=>`'${t.replaceAll("'","'\\''")}'`,Ze='-H "Authorization: Bearer $ROLLER_API_KEY"',ga=t=>`curl -s "$ROLLER_SERVER/v1/kernels:compile" ${Ze} \\
  -H 'Content-Type: application/json' -H 'Prefer: wait=60' \\
  -d ${ha(JSON.stringify(t))}`,Qe=(t,e)=>`curl -s "$ROLLER_SERVER/v1/kernels/${t}/bundle?launcher=${e}" ${Ze} -o kernel.zip
unzip -q kernel.zip -d kernel`,ba=t=>`# with kernel/ in sys.path
import launch

results = launch.Kernel()(${Object.keys(t.inputs).map(e=>`${e}=${e}`).join(", ")})`,Et=t=>(e,s)=>`${Qe(e,t)}

${ba(s)}`,ts=(t,e)=>(s,a,n)=>`${Qe(s,"cpp")}

#include "kernel/${t}"
${e(n)}`,va={ctypes:Et("ctypes"),torch:Et("torch"),"c++":ts("kernel.h",t=>`// ${t}_run(...) takes the addresses of inputs and results`)},ya={cupy:Et("cupy"),torch:Et("torch"),"c++":ts("launch.hpp",t=>`${t}_launcher kernel;  // then kernel.load(image) and kernel.launch(addresses..., stream)`)};function es(t,e){let s={python:fa(t),curl:ga(t)};if(!e)return s;let a=e.launches[0].name.replace(/_kernel\d+$/,""),n=Object.entries(e.language==="c"?va:ya);return{...s,...Object.fromEntries(n.map(([r,i])=>[r,i(e.digest,t,a)]))}}var xa=/(\/\/.*$|\/\*.*?\*\/|"[^"]*"|#\s*\w+|\b\d[\w.]*\b|\b[A-Za-z_]\w*\b)/,wa=new Set("alignas auto bool break case char const constexpr continue do double else extern float for if inline int long return short signed sizeof static struct switch template typename unsigned void volatile while".split(" ")),ka=t=>/^(\/\/|\/\*)/.test(t)?"comment":/^["#]/.test(t)?"string":/^\d/.test(t)?"number":wa.has(t)||/^__\w+__$/.test(t)?"word":/^(wgmma|tma|mma|mbarrier|barrier|cp_async|ldmatrix|_mm)/.test(t)?"instruction":null,Ma=({text:t})=>t.split(xa).map(e=>{let s=e&&ka(e);return s?o`<i class=${s}>${e}</i>`:e}),jt=new Map;function Oa(t,e){let[s,a]=O(null),n=`/v1/kernels/${t}/${e}`;return S(()=>{if(!t)return;let r=!1;return jt.has(n)||jt.set(n,ft(n)),a(null),jt.get(n).then(i=>r||a({text:i}),i=>{jt.delete(n),r||a({error:i.message})}),()=>r=!0},[n]),s}function _a({digest:t,kind:e}){let s=Oa(t,e);if(!s)return o`<p class="quiet" role="status">Reading ${e}…</p>`;if(s.error)return o`<p class="bad" role="status">${s.error}</p>`;let a=s.text.split(`
`);return o`<div class="listing" data-testid=${e} tabindex="0" role="group" aria-label=${e}><pre>${a.map((n,r)=>o`<span class="line"><i class="at">${r+1}</i><${Ma} text=${n} />${`
`}</span>`)}</pre></div>`}function Ta(){let[t,e]=O("python"),[s,a]=O(!1),n=es(W.value,G.value),r=n[t]??n.python,i=async()=>{await navigator.clipboard.writeText(r),a(!0),setTimeout(()=>a(!1),1500)};return o`<div class="launch"><h3>Use it</h3>
    <div class="choices">${Object.keys(n).map(l=>o`<button aria-pressed=${l===t} onClick=${()=>e(l)}>${l}</button>`)}<button onClick=${i}>${s?"copied":"copy"}</button></div>
    <pre data-testid="launch-code" tabindex="0">${r}</pre></div>`}function Sa({kernel:t}){let e=["source",...t.language==="cuda"?["ptx","sass"]:[]],s=e.includes(kt.value)?kt.value:"source",[a]=t.resources,[n]=t.launches,r=[n&&`${k(t.launches.length,"launch").replace("launchs","launches")}`,t.language!=="c"&&n&&`grid ${n.grid.join("×")}, block ${n.block.join("×")}`,a?.registers_per_thread>0&&`${a.registers_per_thread} registers`,a?.shared_bytes>0&&`${w(a.shared_bytes)} shared`,a?.spill_bytes>0&&`spills ${w(a.spill_bytes)}`].filter(Boolean);return o`<p class="quiet">${r.join(" · ")} · <a class="mono" href=${`/k/${t.digest}`}>${t.digest.slice(0,19)}</a></p>
    ${g.value&&Mt.value<0&&o`<p class="note">The kernel is none of the programs above.</p>`}
    ${t.notes.map(i=>o`<p class="note">${i}</p>`)}
    <div class="choices">${e.map(i=>o`<button aria-pressed=${i===s} onClick=${()=>kt.value=i}>${i}</button>`)}</div>
    <${_a} digest=${t.digest} kind=${s} />
    <${Xe} kernel=${t} />`}function te(){let t=G.value;return o`<section class="panel" aria-labelledby="text-title"><header><h2 id="text-title">Kernel</h2></header>
    ${t?o`<${Sa} kernel=${t} />`:o`<p class="quiet">Not compiled: all of the above is the model's word. Compile builds the first program.</p>`}
    ${U.value&&o`<${Ta} />`}</section>`}var z=460,X=280,nt=54,lt=34,ss=14,ct=14;function Ca({terms:t,operations:e}){let s=t.filter(n=>n.unit==="operations").sort((n,r)=>r.amount-n.amount),a=t.find(n=>n.name==="compute");return s[0]?.rate??(a&&e.executed/a.seconds)}function as(){let{device:t}=g.value,e=T.value,s=e.operations.executed,a={name:e.program.unit,rate:Ca(e)},n=t.levels.filter(r=>r.name!==t.tile_levels[1]).map(r=>({level:r,term:e.terms.find(i=>i.name===r.name&&i.unit==="B"&&i.amount>0)})).filter(({term:r})=>r).map(({level:r,term:i})=>({name:r.name,rate:i.rate,moved:i.amount,intensity:s/i.amount,assumed:i.source==="assumed",fill:_(t,r.name)}));return{kernel:e,operations:s,unit:a,levels:n,reached:s/e.seconds}}function ns(){let{unit:t,levels:e,reached:s}=as();if(!e.length||!(t.rate>0)||!(s>0))return null;let a=t.rate,n=e.flatMap($=>[$.intensity,a/$.rate]),r=Math.min(...n)/4,i=Math.max(...n)*4,l=Math.max(a,s)*2.5,d=Math.min(s,a/30)/4,c=$=>nt+(z-nt-ct)*Math.log($/r)/Math.log(i/r),u=$=>X-lt-(X-lt-ss)*Math.log($/d)/Math.log(l/d),v=`${A(s,"operations")} of ${A(a,"operations")}: `+e.map($=>`${$.name} ${pt($.intensity)} op per byte`).join(", ");return o`<figure class="roofline"><svg viewBox=${`0 0 ${z} ${X}`} data-testid="roofline" role="img" aria-label=${v}>
    ${Nt(r,i).map($=>o`<line x1=${c($)} x2=${c($)} y1=${ss} y2=${X-lt} class="grid" />
      <text x=${c($)} y=${X-lt+13} class="tick" text-anchor="middle">${$<1?$.toPrecision(1):Z($)}</text>`)}
    ${Nt(d,l).map($=>o`<line x1=${nt} x2=${z-ct} y1=${u($)} y2=${u($)} class="grid" />
      <text x=${nt-5} y=${u($)+3} class="tick" text-anchor="end">${I($,"").trim()}</text>`)}
    <text x=${(nt+z)/2} y=${X-4} class="label" text-anchor="middle">operations per byte of a level</text>
    <text x=${-(X-lt)/2} y="11" class="label" text-anchor="middle" transform="rotate(-90)">operations per second</text>
    <line x1=${c(Math.max(r,a/Math.max(...e.map($=>$.rate))))} x2=${z-ct} y1=${u(a)} y2=${u(a)} class="roof" />
    <text x=${z-ct} y=${u(a)-4} class="tick strong" text-anchor="end">${t.name} ${A(a,"operations")}</text>
    ${e.map($=>{let f=Math.max(r,d/$.rate),m=Math.min(i,a/$.rate);return o`<line x1=${c(f)} y1=${u(f*$.rate)} x2=${c(m)} y2=${u(m*$.rate)} style=${`stroke:${$.fill};stroke-width:2`} />`})}
    <line x1=${nt} x2=${z-ct} y1=${u(s)} y2=${u(s)} class="reached" />
    ${e.map($=>o`<line x1=${c($.intensity)} x2=${c($.intensity)} y1=${u(s)} y2=${u(Math.min(a,$.intensity*$.rate))} style=${`stroke:${$.fill}`} class="headroom" />
      <circle cx=${c($.intensity)} cy=${u(s)} r="5.5" style=${`fill:${$.fill}`}><title>${$.name}: ${w($.moved)}, ${pt($.intensity)} op/B</title></circle>`)}
  </svg><figcaption>A dot is below its own line by the bandwidth that its level leaves unused.</figcaption></figure>`}function rs(){let{kernel:t,operations:e,unit:s,levels:a}=as(),n=(r,i)=>y(r/i/t.seconds);return o`<table class="levels"><thead><tr><th>level</th><th class="r">moves</th><th class="r">op/B</th><th class="r">busy</th></tr></thead><tbody>
    ${a.map(r=>o`<tr><th scope="row"><i class="dot" style=${`--c:${r.fill}`}></i>${r.name}${r.assumed?o`<small title="the rate is assumed, not measured"> ?</small>`:""}</th>
      <td class="r">${w(r.moved)}</td><td class="r">${pt(r.intensity)}</td><td class="r">${n(r.moved,r.rate)}</td></tr>`)}
    ${s.rate>0&&o`<tr><th scope="row"><i class="dot" style="--c:var(--compute)"></i>${s.name}</th><td class="r" colspan="2">${I(e,"operations")}</td><td class="r">${n(e,s.rate)}</td></tr>`}
  </tbody></table>`}var is=.01,Ea=5,os=t=>t.reduce((e,s)=>e+x(s),0),ut=({name:t})=>o`<i class="dot" style=${`--c:${_(g.value.device,t)}`}></i>`;function ja({amount:t,unit:e,rate:s,source:a}){return e!=="B"&&e!=="operations"?"":`${I(t,e)} at ${A(s,e)}${a==="assumed"?" (assumed)":""}, `}function Aa(t){let[e,s]=it(t);if(e){let[r,...i]=e.terms,l=i.length?`${h(x(r))} of ${h(e.seconds)}, to which ${i.map(d=>d.name).join(", ")} add`:`${ja(r)}${h(e.seconds)}`;return o`<li><${ut} name=${r.name} /><b>${r.name} takes longest</b>: ${l}.
      ${s&&` ${s.name} beside it would be done after ${h(s.seconds)}.`}</li>`}let[a,n]=Xt(t).sort((r,i)=>x(i)-x(r));return a?o`<li><${ut} name=${a.name} /><b>Mostly ${a.name}</b>: ${y(x(a)/t.seconds)} of the time${n&&`, then ${n.name} with ${y(x(n)/t.seconds)}`}. These terms add up.</li>`:null}function La({name:t,unit:e}){return e==="B"?`${t} bandwidth`:Jt.includes(t)&&e==="operations"?"arithmetic rate":"issue rate"}function Na({limited_by:t=[]},e){let[s]=t,a=it(e)[0]?.terms[0];if(!a||!s||s.saved<is)return null;let n=La(a),r=t.find(i=>i.resource===n)??{resource:n,saved:0};return s===r||s.saved<2*r.saved?null:o`<li><${ut} name=${s.resource.split(" ")[0]} /><b>But ${s.resource} limits</b>: 10 % more of it saves ${y(s.saved)},
    10 % more ${r.resource} ${r.saved<5e-4?"nothing":`only ${y(r.saved)}`}.</li>`}function Ra(t){let e=Q(t),s=e.flatMap(Xt);if(!e.some(r=>it(r).length)||os(s)<is*t.seconds)return null;let a=new Map;for(let r of s)a.set(r.name,(a.get(r.name)??0)+x(r));let n=[...a].map(([r,i])=>`${r} ${h(i)}`).join(", ");return o`<li><${ut} name="exposed" />Not hidden: ${n}. That is ${y(os(s)/t.seconds)} of the time.</li>`}function Ia({operations:t}){let e=t.executed/t.definition;return Math.abs(e-1)>.02?o`<li><${ut} name="compute" />It executes ${I(t.executed,"operations")}, ${y(e)} of the${" "}
    ${I(t.definition,"operations")} of the definition.</li>`:null}function qa(t){let e=ot(t);return e.length?o`<li data-testid="once"><i class="dot" style="--c:var(--ink-3)"></i>Once, before all calls: ${h(e.reduce((s,a)=>s+a.seconds,0))}${" "}
    of ${e.map(s=>s.group).join(", ")}, of constants alone. No call has it.</li>`:null}function Pa(t,e){return e?o`<li><i class="dot" style="--c:var(--ink-3)"></i>No tiles go below ${h(e.seconds)}${" "}
    (${e.arithmetic_seconds>e.traffic_seconds?`${I(e.operations,"operations")} on ${e.unit}`:`${w(e.bytes)} once through ${e.level}`}):${" "}
    this is ${F(t.seconds/e.seconds)} that.</li>`:null}function Ba(t){let e=G.value?.measurement?.median_s;if(!e)return null;let s=t.seconds/e-1;return o`<li><i class="dot" style="--c:var(--good)"></i>Measured ${h(e)}: the estimate is ${y(Math.abs(s))} ${s>0?"high":"low"}.</li>`}function Da({resources:t}){if(!t)return o`<p class="quiet" data-testid="sensitivity">What more of each resource saves is known of the first program.</p>`;let e=t.filter(s=>s.saved>5e-4).slice(0,Ea);return o`<div data-testid="sensitivity"><h3>10 % more of … saves</h3>
    ${e.map(({resource:s,saved:a})=>o`<div class="saves"><span>${s}</span>
      <svg height="8" width="100%" aria-hidden="true"><rect width=${`${Math.min(100,1e3*a)}%`} height="8" style=${`fill:${_(g.value.device,s.split(" ")[0])}`} /></svg>
      <em>${(100*a).toFixed(1)} %</em></div>`)}
    ${!e.length&&o`<p class="quiet">Nothing above 0.05 %.</p>`}</div>`}function ls(){let{device:t,floor:e}=g.value,s=ge.value,a=T.value,n=Q(s),r=[["bound",o`<span style=${`color:${B(t,s.bound)}`}>${s.bound}</span>`],e&&["above the floor",F(s.seconds/e.seconds)],["rate",A(ce(s)/s.seconds,"operations")],["waves",a.waves],["occupancy",y(a.occupancy)],s.uncertainty&&["true within",F(s.uncertainty)]].filter(Boolean);return o`<section class="panel verdict" aria-labelledby="verdict-title" data-testid="verdict">
    <h2 class="unseen" id="verdict-title">Verdict</h2>
    <div class="headline"><p class="big" data-testid="estimate">${h(s.seconds)}</p>
      <dl>${r.map(([i,l])=>o`<div><dt>${i}</dt><dd>${l}</dd></div>`)}</dl></div>
    <${Ct} kernels=${n} device=${t} longest=${s.seconds} height=${26} />
    <${Ge} kernels=${n} device=${t} />
    <div class="why"><div>
        <ul class="sentences">${Aa(a)}${Na(s,a)}${Ra(s)}${Ia(a)}${qa(s)}${Pa(s,e)}${J.value===Mt.value&&Ba(s)}</ul>
        <div class="facts"><${Da} resources=${s.limited_by} /><${rs} /></div></div>
      <${ns} /></div>
  </section>`}var Ka=()=>o`<svg width="18" height="18" viewBox="0 0 18 18" aria-hidden="true">
  <rect width="18" height="18" rx="2" style="fill:var(--outer)" />
  <rect width="12" height="12" style="fill:var(--block)" />
  <rect width="6" height="6" style="fill:var(--thread)" />
</svg>`,Ha=[["Kernel","/"],["Model","/m"],["Farm","/farm"]],Lt=/^\/m(\/|$)/.test(location.pathname)?"/m":location.pathname==="/farm"?"/farm":"/";function Fa({address:t}){let[e,s]=O(!1),a=async r=>{navigator.clipboard&&(r.preventDefault(),await navigator.clipboard.writeText(new URL(t.value,location.href).href),s(!0),setTimeout(()=>s(!1),1500))},n=Ft.value==="dark"?"light":"dark";return o`<header class="top">
    <a class="brand" href="/"><${Ka} /><b>roller</b></a>
    <nav aria-label="pages">${Ha.map(([r,i])=>o`<a href=${i} aria-current=${i===Lt?"page":null}>${r}</a>`)}</nav>
    <a class="link" data-testid="permalink" href=${t.value} onClick=${a}>${e?"copied":"copy link"}</a>
    <button class="theme" onClick=${()=>Ft.value=n}>${n}</button>
  </header>`}function Ua(){let t=xt.value&&o`<p class="note" data-testid="remark">${xt.value}</p>`;return!g.value&&G.value?o`${t}<${te} />`:g.value?o`${P.value&&!xt.value&&o`<p class="note">Below is the last program ${_t.value?"without errors":"that was explained"}.</p>`}${t}<${ls} /><${qe} /><${We} /><${te} />`:o`<p class="waiting" role="status">${P.value?"":"Constructing tiles…"}</p>`}var Ga=()=>o`<main class="kernel"><h1 class="unseen">Why this tile</h1><${He} /><div class=${["work",P.value&&"old",et.value&&"waits"].filter(Boolean).join(" ")} aria-busy=${et.value}><${Ua} /></div></main>`,At=Lt==="/m"?await import("./modelpage-ALC2EOLL.js"):Lt==="/farm"?await import("./farm-RJCYG5NW.js"):{Page:Ga,address:be,load:Ee};document.title={"/":"roller: see why this tile","/m":"roller: a model","/farm":"roller: the build farm"}[Lt];var Ja=()=>o`<${Ue} /><${Fa} address=${At.address} /><${Fe} load=${At.load} /><${At.Page} />`;At.load();ee(o`<${Ja} />`,document.getElementById("app"));
